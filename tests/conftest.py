"""One thread and one seed for every test: results do not depend on the machine or the order."""

import functools
import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="session")
def _prose_is_parsed_once() -> Iterator[None]:
    """The corpus `docs` takes five seconds to parse, and is the same in every test."""
    from interp.data import corpus  # type checks are set up after this file was read

    parse = corpus._library_prose
    # A test may replace the files that are parsed: then it gets the prose of those.
    parsed = functools.cache(lambda sources: tuple(parse()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_library_prose", lambda: parsed(corpus._library_sources))
        yield
