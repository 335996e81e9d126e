"""What is known of a model that transcribes: what it reads, and the tokens by which it is told what to do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from funitel.proto.errors import InvalidRequest, StartupError
from funitel.router.audio.languages import code_of
from funitel.router.text.model_files import ModelFiles

ARCHITECTURE = "WhisperForConditionalGeneration"
TRANSCRIBE, TRANSLATE = "transcribe", "translate"
MAX_SHOWN = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechModel:
    """Token ids and sizes of a checkpoint of Whisper. `languages` are by code; an English-only model has none."""

    num_mel_bins: int
    num_features: int  # of a window of 30 s
    max_tokens: int  # that the decoder reads and writes
    end: int  # ids below it are text
    start: int
    no_timestamps: int
    previous: int | None  # what stands before text that came earlier
    no_speech: int | None
    languages: Mapping[str, int]
    tasks: Mapping[str, int]

    @property
    def first_timestamp(self) -> int:
        """The token of 0 s; each further one is 20 ms later."""
        return self.no_timestamps + 1

    @property
    def num_frames(self) -> int:
        """Frames of a window."""
        return 2 * self.num_features

    @classmethod
    def of(cls, files: ModelFiles, token_id: Callable[[str], int | None]) -> "SpeechModel | None":
        """Read a model folder; None where its model is none that transcribes.

        Args:
            files: of the folder.
            token_id: of the text of a token; None for none.

        Raises:
            StartupError: a file says what cannot be, or a token is missing.
        """
        config = files.json("config.json")
        if ARCHITECTURE not in (config.get("architectures") or []):
            return None
        generation = config | files.json("generation_config.json")

        def size(name: str, default: int) -> int:
            value = config.get(name, default)
            if type(value) is not int or value < 1:
                raise StartupError(f"config.json of {ARCHITECTURE}: {name} must be a number > 0, given {value!r:.40}")
            return value

        def known(name: str, text: str) -> int | None:
            value = generation.get(name)
            return value if type(value) is int else token_id(text)

        def needed(name: str, text: str) -> int:
            found = known(name, text)
            if found is None:
                raise StartupError(f"the model knows no token {text} ({name} of generation_config.json)")
            return found

        no_timestamps = needed("no_timestamps_token_id", "<|notimestamps|>")
        languages = _ids(generation, "lang_to_id")
        return cls(
            num_mel_bins=size("num_mel_bins", 80),
            num_features=size("max_source_positions", 1500),
            max_tokens=size("max_target_positions", 448),
            end=needed("eos_token_id", "<|endoftext|>"),
            start=needed("decoder_start_token_id", "<|startoftranscript|>"),
            no_timestamps=no_timestamps,
            previous=known("prev_sot_token_id", "<|startofprev|>"),
            no_speech=no_timestamps - 1,
            languages={text.strip("<|>"): found for text, found in languages.items()},
            tasks=_ids(generation, "task_to_id"),
        )

    def language(self, given: str) -> str:
        """The code of a language that a client names by code or name.

        Raises:
            InvalidRequest: the model does not know it.
        """
        code = code_of(given)
        if code not in self.languages and not (code == "en" and not self.languages):
            known = ", ".join(sorted(self.languages)) or "en"
            raise InvalidRequest(
                f"`language` must be one of the model's languages: {known}. Given: {given[:MAX_SHOWN]!r}", "language"
            )
        return code

    def opening(self, language: str | None, task: str, *, with_timestamps: bool) -> list[int]:
        """The tokens that the decoder begins with; `language` is a code, None for a model of one language."""
        found = [self.start]
        if self.languages and language is not None:
            found.append(self.languages[language])
            found += [self.tasks[task]] if task in self.tasks else []
        return found if with_timestamps else [*found, self.no_timestamps]

    def check_task(self, task: str) -> None:
        """Raise InvalidRequest for a task that the model was not made for."""
        if task == TRANSLATE and (not self.languages or TRANSLATE not in self.tasks):
            raise InvalidRequest("the model does not translate: it knows one language alone", "model")


def _ids(generation: Mapping[str, Any], name: str) -> dict[str, int]:
    found = generation.get(name) or {}
    if not isinstance(found, dict) or not all(type(each) is int for each in found.values()):
        raise StartupError(f"generation_config.json: {name} must be token ids by name")
    return found
