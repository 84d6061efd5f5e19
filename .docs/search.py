"""The site's search is asked what a newcomer would ask; the right page must be among the first three.

What helps all questions, also those that nobody lists: `BOOSTS` of build.py, the separator of mkdocs.yml, which drops
words without a meaning, and the headings of the FAQ, which are questions.
"""

import json
import pathlib
import re
from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

import lunr
from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter

FIRST = 3
QUERIES = {  # and the pages that answer, one of which is enough
    "burn in": ["guides/recurrent/"],
    "PER": ["guides/priorities/", "recipes/deep-q/", "faq/", "buffers/", "reference/samplers/"],
    "vmap seeds": ["guides/scan/", "faq/", "guides/devices/"],
    "terminated truncated": ["guides/truncation/"],
    "n-step": ["guides/truncation/", "reference/tracing/", "reference/sequences/"],
    "save": ["guides/checkpoints/", "reference/checkpoints/"],
    "n step": ["guides/truncation/", "reference/tracing/"],
    "multi gpu": ["guides/devices/"],
    "pixel": ["faq/", "guides/sequences/"],
    "atari": ["faq/", "guides/sequences/", "recipes/deep-q/"],
    "curriculum": ["guides/curricula/"],
    "out of memory": ["guides/memory/"],
    "warmup": ["faq/", "guides/scan/"],
    "memmap": ["guides/datasets/"],
    "save buffer": ["faq/", "guides/checkpoints/", "reference/checkpoints/"],
    "gymnasium": ["faq/", "guides/host/"],
    "dreamer": ["guides/draws/", "recipes/sequences/"],
    "wandb": ["faq/", "guides/stack/"],
    "frame stack": ["guides/sequences/", "reference/sequences/"],
    "offline": ["guides/datasets/", "guides/mixtures/"],
    "set_priorities": ["faq/", "guides/priorities/"],
    "update_priorities": ["faq/", "guides/priorities/", "coming_from/torchrl/"],
    "prioritised": ["faq/", "guides/priorities/", "coming_from/flashbax/"],
    "license": ["faq/"],
    "PPO": ["faq/", "buffers/"],
    "LSTM": ["faq/", "guides/recurrent/", "recipes/agents/", "recipes/sequences/"],
    "GRU": ["faq/", "guides/recurrent/", "recipes/agents/", "recipes/sequences/"],
    "recurrent": ["guides/recurrent/"],
    "TensorBoard": ["faq/", "guides/stack/"],
    "nnx": ["guides/stack/"],
    "equinox": ["guides/stack/"],
    "CheckpointManager": ["guides/stack/"],
    "brax": ["faq/", "guides/stack/"],
    "EnvPool": ["guides/stack/"],
    "trajectory buffer": ["coming_from/flashbax/"],
    "min_length": ["coming_from/flashbax/"],
    "minibatches": ["faq/", "guides/draws/"],
    "is_first": ["guides/truncation/"],
    "gymnax": ["index", "faq/", "programs/", "guides/scan/"],
    "tracer.add": ["reference/tracing/", "guides/scan/", "guides/truncation/"],
    "max_age": ["guides/draws/"],
    "lax.cond": ["faq/", "guides/memory/"],
    "checkpoint": ["guides/checkpoints/", "reference/checkpoints/"],
    "truncated": ["guides/truncation/", "reference/tracing/"],
    "TransitionBatch": ["reference/tracing/"],
    "D4RL": ["guides/datasets/", "reference/datasets/"],
    "donated": ["faq/", "guides/memory/"],
    "threads": ["guides/threads/", "reference/shared/"],
    "Sebulba": ["guides/threads/", "buffers/"],
    "samples per insert": ["guides/threads/", "reference/shared/"],
    "GRPO": ["guides/rollouts/", "recipes/games/"],
    "staleness": ["guides/rollouts/", "guides/draws/", "evidence/"],
    "preempted": ["guides/rollouts/"],
    "NaN": ["faq/", "guides/priorities/"],
    # Whole questions.
    "how do I clear the buffer": ["faq/", "buffers/", "reference/replay_buffer/"],
    "what happens with NaN priorities": ["faq/", "guides/priorities/"],
    "does it support dict observations": ["faq/"],
    "GPU out of memory": ["guides/memory/", "faq/"],
    "difference with flashbax trajectory buffer": ["coming_from/flashbax/"],
    "multi agent shared reward": ["guides/truncation/", "recipes/agents/", "faq/"],
    "mask illegal actions": ["faq/"],
    "normalize rewards": ["faq/"],
    "actors in other processes": ["guides/threads/", "recipes/agents/", "faq/"],
    "resume a preempted run": ["guides/checkpoints/", "guides/rollouts/", "faq/"],
    "are runs deterministic": ["faq/", "guides/checkpoints/"],
    "increase the capacity later": ["faq/", "guides/checkpoints/"],
    "anneal beta": ["faq/", "guides/priorities/"],
    "remove an item from the buffer": ["faq/"],
    "frame stacking atari": ["guides/sequences/", "recipes/deep-q/", "faq/"],
    "GAE lambda returns": ["faq/", "guides/truncation/"],
    "why is the first call slow": ["faq/", "speed/"],
    "float64 support": ["faq/"],
    "variable length episodes": ["faq/", "guides/sequences/"],
    "how do I seed": ["faq/"],
    "number of items in the buffer": ["faq/", "buffers/", "reference/replay_buffer/"],
    "sample with replacement": ["guides/draws/", "reference/samplers/", "buffers/"],
    "importance weights in the loss": ["faq/", "guides/priorities/"],
    "save to disk": ["guides/checkpoints/", "guides/datasets/"],
    "which python version": ["faq/", "index"],
    "sampling before the buffer is full": ["faq/", "guides/scan/"],
    "rewards arrive later": ["guides/writes/"],
    "draw the newest items": ["guides/draws/", "faq/"],
    "use several GPUs": ["guides/devices/"],
    "FastTD3": ["guides/many_environments/"],
    "asymmetric": ["guides/many_environments/"],
    "action chunks": ["guides/many_environments/"],
}


def check(site: pathlib.Path) -> list[str]:
    """Queries that do not find their page, with the pages that they find."""
    first = finder(json.loads((site / "search/search_index.json").read_text()))
    found = {query: first(query)[:FIRST] for query in QUERIES}
    return [
        f"search for {query!r}: found {found[query]}, expected one of {pages}"
        for query, pages in QUERIES.items()
        if not set(pages) & set(found[query])
    ]


def finder(index: dict[str, Any]) -> Callable[[str], list[str]]:
    """The pages that the site's search finds in a browser, the best first.

    As in Material's worker: each word is a prefix, except before a hyphen, and any of them is enough. The head of a
    page counts more, and a section with more of the words.
    """
    separator, articles = re.compile(index["config"]["separator"]), set()
    heads = {doc["location"] for doc in index["docs"] if is_head(doc["location"], articles)}

    def words(field: str) -> Callable[[dict[str, str]], list[str]]:
        return lambda doc: [word for word in separator.split(re.sub(r"<[^>]*>", " ", doc[field])) if word]

    boosts = {name: field["boost"] for name, field in index["config"]["fields"].items() if name != "tags"}
    fields = [{"field_name": name, "boost": boost, "extractor": words(name)} for name, boost in boosts.items()]
    builder = Builder()
    builder.pipeline.add(stop_word_filter)  # and no stemmer, as in the site
    builder.b(0)
    docs = [(doc, {"boost": doc.get("boost", 1)}) for doc in index["docs"]]
    made = lunr.lunr("location", fields, docs, builder=builder)

    def first(query: str) -> list[str]:
        clauses = []
        for part in query.split():
            *whole, last = ([word.lower() for word in separator.split(x) if word] for x in part.split("-"))
            clauses += [*chain(*whole), *(f"{word}*" for word in last)]
        terms, scores = [clause.removesuffix("*") for clause in clauses], Counter()
        for result in made.search(" ".join(clauses)):
            page, matched = result["ref"].partition("#")[0] or "index", result["match_data"].metadata
            found = {word: any(x.startswith(word) for x in matched) for word in terms}
            counted = [is_there for word, is_there in found.items() if is_there or stop_word_filter(word)]
            boost = (result["ref"] in heads) + sum(counted) / len(counted)
            scores[page] = max(scores[page], result["score"] * (1 + boost**2))
        return [page for page, _ in scores.most_common()]

    return first


def is_head(location: str, seen: set[str]) -> bool:
    """True for the first section of each page."""
    page = location.partition("#")[0]
    return not (page in seen or seen.add(page))
