"""Chapters: what one command wrote, as the findings, sections and heads that it brings to a page.

One invariant: a page has one explorer, which knows the heads of all its chapters, each by a name
that no other has.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from interp.views.pages.explorer import Score, Subject, merged
from interp.views.pages.page import Explorer, Page, Plot, Section

Shape = tuple[int, int]


@dataclass(frozen=True)
class Chapter:
    """A page as it would stand alone, and the models or runs whose heads it knows.

    `label` says which folder it is made from, where there are several.
    """

    page: Page
    subjects: tuple[Subject, ...] = ()
    label: str = ""


def bound(chapters: Sequence[Chapter], title: str = "") -> Page:
    """One page of all chapters: their findings, one explorer of their heads, their sections.

    Sections of several chapters are headed by their chapter's title; where two have one name, they
    are numbered apart. Findings of two chapters that begin alike are led by the chapter's label.
    Runs of one name from several chapters, and models of one name and several shapes, stay apart.
    """
    chapters = _titled_apart(_named_apart(chapters))
    first = chapters[0].page
    if len(chapters) == 1:
        whole = replace(first, title=title or first.title)
    else:
        names = Counter(section.name for own in chapters for section in own.page.sections)
        sections = tuple(
            replace(
                section,
                name=f"{section.name}-{place}" if names[section.name] > 1 else section.name,
                heading=f"{own.page.title}: {section.heading}",
            )
            for place, own in enumerate(chapters, start=1)
            for section in own.page.sections
        )
        origins = dict.fromkeys(chapter.page.origin for chapter in chapters)
        whole = Page(
            title or " and ".join(dict.fromkeys(chapter.page.title for chapter in chapters)),
            origin=" · ".join(filter(None, origins)),
            findings=_findings(chapters),
            sections=sections,
        )
    subjects = tuple(
        replace(subject, scores=_scores_apart(subject.scores))
        for subject in merged([own for chapter in chapters for own in chapter.subjects])
        if subject.scores or subject.texts
    )
    if not subjects:
        return whole
    explorer = Section("explorer", "Explorer", (Explorer(subjects),))
    return replace(whole, sections=(explorer, *whole.sections))


def _titled_apart(chapters: Sequence[Chapter]) -> list[Chapter]:
    titles = Counter(chapter.page.title for chapter in chapters)
    return [
        replace(own, page=replace(own.page, title=f"{own.page.title} ({own.label})"))
        if titles[own.page.title] > 1 and own.label
        else own
        for own in chapters
    ]


def _findings(chapters: Sequence[Chapter]) -> tuple[str, ...]:
    """The findings of all, each once; of which folder, where another has one of the same kind."""
    kinds = Counter(
        kind
        for own in chapters
        for kind in {line.partition(":")[0] for line in dict.fromkeys(own.page.findings)}
    )
    lines: dict[str, None] = {}
    for own in chapters:
        for line in own.page.findings:
            led = kinds[line.partition(":")[0]] > 1 and own.label
            lines[f"{own.label}: {line}" if led else line] = None
    return tuple(lines)


def _scores_apart(scores: Sequence[Score]) -> tuple[Score, ...]:
    """Scores of one name with what they do not share of how they were measured, or numbered.

    Where one fact is enough it is the shortest: of a text how it begins, not its length as well.
    """
    found = []
    for score in scores:
        rivals = [other for other in scores if other.name == score.name]
        if len(rivals) == 1:
            found.append(score)
            continue
        facts = [other.about.split("; ") for other in rivals]
        own = [
            fact for fact in score.about.split("; ") if not all(fact in other for other in facts)
        ]
        alone = [fact for fact in own if sum(fact in other for other in facts) == 1]
        own = [min(alone, key=len)] if alone else own
        alike = [other for other in rivals if other.about == score.about]
        if len(alike) > 1:
            place = next(i for i, other in enumerate(alike, start=1) if other is score)
            own.append(f"{place} of {len(alike)}")
        found.append(replace(score, name=f"{score.name}: {'; '.join(own)}"))
    return tuple(found)


# --- subjects that only share a name ----------------------------------------------------------


def _named_apart(chapters: Sequence[Chapter]) -> list[Chapter]:
    """The chapters, where the name of a subject is that of one run or model only."""
    of_run = {
        (chapter.label, subject.name)
        for chapter in chapters
        for subject in chapter.subjects
        if subject.steps
    }
    runs = Counter(name for _, name in of_run)
    shapes: dict[str, list[Shape]] = {}
    for subject in (own for chapter in chapters for own in chapter.subjects):
        known = shapes.setdefault(subject.name, [])
        if _measured_whole(subject) and _shape(subject) not in known:
            known.append(_shape(subject))

    def renamed(subject: Subject, chapter: Chapter) -> str:
        name, known = subject.name, shapes[subject.name]
        if runs[name] > 1 and chapter.label and (chapter.label, name) in of_run:
            return f"{name} ({chapter.label})"
        n_layers, n_heads = _shape(subject)
        fitting = [one for one in known if n_layers <= one[0] and n_heads <= one[1]]
        if len(known) < 2 or not fitting:
            return name
        if (n_layers, n_heads) not in known:
            n_layers, n_heads = fitting[0]
        return f"{name} ({n_layers} × {n_heads} heads)"

    found = []
    for chapter in chapters:
        names = [renamed(subject, chapter) for subject in chapter.subjects]
        both = list(zip(chapter.subjects, names, strict=True))
        if all(subject.name == name for subject, name in both):
            found.append(chapter)
            continue
        _rename_maps(chapter.page, {(own.name, *_shape(own)): name for own, name in both})
        subjects = tuple(replace(own, name=name) for own, name in both)
        found.append(replace(chapter, subjects=subjects))
    return found


def _measured_whole(subject: Subject) -> bool:
    """Whether its grid is the model's: ablations may be of some heads only, analyses are of all."""
    return not subject.steps and any(not score.effect for score in subject.scores)


def _shape(subject: Subject) -> Shape:
    return subject.n_layers, subject.n_heads


def _rename_maps(page: Page, names: dict[tuple[str, int, int], str]) -> None:
    """Give the maps that choose heads of a subject its new name."""
    figures = [part.figure for s in page.sections for part in s.parts if isinstance(part, Plot)]
    for trace in (trace for figure in figures for trace in figure.data):
        if not isinstance(trace.meta, dict) or "subject" not in trace.meta:
            continue
        old = trace.meta["subject"]
        by_name = [new for (name, *_), new in names.items() if name == old]
        if by_name:
            new = names.get((old, len(trace.z), len(trace.z[0])), by_name[0])
            trace.meta = {**trace.meta, "subject": new}
