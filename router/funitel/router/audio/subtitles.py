"""Write the segments of a transcript as subtitles: SubRip and WebVTT."""

from collections.abc import Iterable

from funitel.router.audio.segments import Segment


def srt(segments: Iterable[Segment]) -> str:
    """SubRip: numbered, with hours, and commas before milliseconds."""
    return "".join(
        f"{number}\n{_time(each.start, ',')} --> {_time(each.end, ',')}\n{_line(each)}\n\n"
        for number, each in enumerate(segments, 1)
    )


def vtt(segments: Iterable[Segment]) -> str:
    """WebVTT: with hours only where there are any."""
    cues = [f"{_short(each.start)} --> {_short(each.end)}\n{_line(each)}\n\n" for each in segments]
    return "WEBVTT\n\n" + "".join(cues)


def _line(segment: Segment) -> str:
    """A text in one line, which says nothing to a program that reads it."""
    return " ".join(segment.text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    milliseconds = round(seconds * 1000)
    minutes, milliseconds = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{milliseconds // 1000:02}{mark}{milliseconds % 1000:03}"


def _short(seconds: float) -> str:
    return _time(seconds, ".").removeprefix("00:")
