"""The site's search is asked what a newcomer would ask; the right page must be among the first three."""

import json
import pathlib
import re
from collections import Counter

import lunr
from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter

FIRST = 3
QUERIES = {  # and the pages that answer, one of which is enough
    "set_priorities": ["faq/", "guides/priorities/"],
    "update_priorities": ["faq/", "guides/priorities/", "coming_from/torchrl/"],
    "prioritised": ["faq/", "guides/priorities/", "coming_from/flashbax/"],
    "license": ["faq/"],
    "Atari": ["faq/", "guides/sequences/", "recipes/games/"],
    "PPO": ["faq/", "buffers/"],
    "LSTM": ["faq/", "guides/recurrent/", "recipes/agents/", "recipes/sequences/"],
    "GRU": ["faq/", "guides/recurrent/", "recipes/agents/", "recipes/sequences/"],
    "recurrent": ["guides/recurrent/"],
    "burn-in": ["guides/recurrent/"],
    "TensorBoard": ["faq/", "guides/stack/"],
    "wandb": ["faq/", "guides/stack/"],
    "nnx": ["guides/stack/"],
    "equinox": ["guides/stack/"],
    "CheckpointManager": ["guides/stack/"],
    "brax": ["guides/stack/"],
    "EnvPool": ["guides/stack/"],
    "trajectory buffer": ["coming_from/flashbax/"],
    "min_length": ["coming_from/flashbax/"],
    "minibatches": ["guides/draws/"],
    "is_first": ["guides/truncation/"],
    "gymnax": ["index", "faq/", "programs/", "guides/scan/"],
    "gymnasium": ["faq/", "guides/host/"],
    "tracer.add": ["reference/tracing/", "guides/scan/", "guides/truncation/"],
    "max_age": ["guides/draws/"],
    "lax.cond": ["faq/", "guides/memory/"],
    "checkpoint": ["guides/checkpoints/", "reference/checkpoints/"],
    "truncated": ["guides/truncation/", "reference/tracing/"],
    "TransitionBatch": ["reference/tracing/"],
    "frame stack": ["guides/sequences/", "reference/sequences/"],
    "D4RL": ["guides/datasets/", "reference/datasets/"],
    "donated": ["faq/", "guides/memory/"],
    "threads": ["guides/threads/", "reference/shared/"],
    "Sebulba": ["guides/threads/", "buffers/"],
    "samples per insert": ["guides/threads/", "reference/shared/"],
    "GRPO": ["guides/rollouts/", "recipes/games/"],
    "staleness": ["guides/rollouts/", "guides/draws/", "evidence/"],
    "preempted": ["guides/rollouts/"],
    "NaN": ["faq/", "guides/priorities/"],
}


def check(site: pathlib.Path) -> list[str]:
    """Queries that do not find their page, with the pages that they find."""
    index = json.loads((site / "search/search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])

    def words(field: str):
        return lambda doc: [word for word in separator.split(re.sub(r"<[^>]*>", " ", doc[field])) if word]

    boosts = {name: field["boost"] for name, field in index["config"]["fields"].items() if name != "tags"}
    fields = [{"field_name": name, "boost": boost, "extractor": words(name)} for name, boost in boosts.items()]
    builder = Builder()
    builder.pipeline.add(stop_word_filter)  # and no stemmer, as in the site
    found = lunr.lunr("location", fields, index["docs"], builder=builder)
    wrong = []
    for query, pages in QUERIES.items():
        terms = [word for word in separator.split(query) if word]
        scores = Counter()
        for result in found.search(" ".join(f"+{word}*" for word in terms)):
            page = result["ref"].partition("#")[0] or "index"
            scores[page] = max(scores[page], result["score"])
        first = [page for page, _ in scores.most_common(FIRST)]
        if not set(pages) & set(first):
            wrong.append(f"search for {query!r}: found {first}, expected one of {pages}")
    return wrong
