"""Generate the workload of a benchmark from a seed: lengths, words and arrival times. Pure."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

# Words that most vocabularies hold as one token, so that a prompt of n of them has close to n tokens.
WORDS = tuple(
    """the and of to in that is was for with as on at by from this be are have not but they which one you were all her
    she there would their we him been has when who will more no if out so said what up its about into than them can
    only other new some could time these two may then do first any my now such like our over man me even most made
    after also did many before must through back years where much your way well down should because each just those
    people how too little state good very make world still own see men work long get here between both life being
    under never day same another know while last might us great old year off come since against go came right used
    take three house use during without again place around however home small found part school thought went say
    general once high upon every war until always away something fact though water less public put think almost hand
    enough far took head yet system better set told nothing night end why find going look point knew next city
    business give group young few order power door left case far often seems food light""".split()
)

# Means quoted for conversations of the ShareGPT collection, with similar spreads: most are short, some are very long.
# No data set is read.
SHAREGPT_PROMPT, SHAREGPT_OUTPUT = 161, 338
PROMPT_SPREAD, OUTPUT_SPREAD = 1.2, 0.9  # standard deviations of the logarithm
MIN_TOKENS, MAX_TOKENS = 4, 1024


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """Specification of one request: the words its prompt is cut from, and its lengths in tokens.

    `prefix_words` come first and are shared by the requests of a group; they fill `prefix_tokens` of the
    `prompt_tokens`.
    """

    words: tuple[str, ...]
    prompt_tokens: int
    output_tokens: int
    prefix_words: tuple[str, ...] = ()
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of workload. Lengths are exact, or means for `sharegpt`."""

    kind: str
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    num_groups: int = 1

    def prompt_specs(self, count: int, *key: object) -> list[PromptSpec]:
        """`count` requests; the same key gives the same ones, another key gives other prompts."""
        random = Random(repr(key))
        prefixes = [_draw(random, self.prefix_tokens) for _ in range(self.num_groups)] if self.prefix_tokens else [()]
        specs = []
        for index in range(count):
            prompt, output = self._lengths(random)
            words = _draw(random, prompt - self.prefix_tokens)
            prefix = prefixes[index % len(prefixes)]
            specs.append(PromptSpec(words, prompt, output, prefix, self.prefix_tokens))
        return specs

    def _lengths(self, random: Random) -> tuple[int, int]:
        if self.kind != "sharegpt":
            return self.prompt_tokens, self.output_tokens
        return _length(random, self.prompt_tokens, PROMPT_SPREAD), _length(random, self.output_tokens, OUTPUT_SPREAD)


def arrivals(rate: float, count: int, *key: object) -> Iterator[float]:
    """Seconds from the start at which `count` requests are made, `rate` a second on average and independent of each
    other."""
    random, now = Random(repr(key)), 0.0
    for _ in range(count):
        yield now
        now += random.expovariate(rate)


def _draw(random: Random, num_tokens: int) -> tuple[str, ...]:
    """Enough words for `num_tokens`; a word has at least one token."""
    return tuple(random.choices(WORDS, k=num_tokens))


def _length(random: Random, mean: float, spread: float) -> int:
    """A log-normal length, clipped to bounds; clipping makes the mean slightly smaller."""
    drawn = random.lognormvariate(math.log(mean) - spread**2 / 2, spread)
    return round(min(max(drawn, MIN_TOKENS), MAX_TOKENS))
