"""Options for the choice of tokens apart from the model: drafts, grammars, processors, seeds."""

from __future__ import annotations

import argparse

from pagewood.server.cli.options.page import Group, Page


def add_sampling_options(page: Page) -> None:
    """Add the groups."""
    offer = page.group("drafts, grammars, logits")
    offer.setting(
        "--speculative",
        metavar="DRAFTER",
        help="off, ngram, suffix, draft, eagle or auto (default: %(default)s)",
        more="It proposes the next tokens, and the model verifies all of them in one step: the text stays the same, "
        "and comes faster. ngram: earlier text of the request. suffix: that and earlier answers. draft: a small model. "
        "eagle: an EAGLE-3 or MTP head. auto: the head or the draft model in the model's folder, otherwise ngram.",
    )
    offer.add(
        "--speculative-model",
        metavar="PATH",
        help="folder of draft model or head (default: in the model's folder)",
        more="There it is the folder `draft` or `eagle`.",
    )
    _add_drafts(offer)
    offer.setting(
        "--grammar-backend",
        metavar="NAME",
        help="for JSON schemas: llguidance or xgrammar (default: %(default)s)",
        more="It compiles expressions and other grammars, too. xgrammar needs pagewood-engine[xgrammar].",
    )
    offer.setting(
        "--grammar-timeout",
        dest="grammar_timeout_s",
        metavar="S",
        help="longest time to compile a grammar, then 400 (default: %(default)s)",
        more="Above 0.",
    )
    offer.add(
        "--logits-processor",
        type=_named_place,
        action="append",
        default=[],
        dest="logits_processors",
        metavar="NAME=PLACE",
        help="function that requests may name to change logits; repeatable",
        more="PLACE is PACKAGE.MODULE:FUNCTION. It is imported and runs in the engine's process, so use trusted code "
        "only.",
    )
    offer.setting(
        "--random-seed",
        dest="seed",
        metavar="N",
        help="seed of requests without a seed (default: %(default)s)",
    )


def _add_drafts(offer: Group) -> None:
    offer.setting(
        "--speculative-num-tokens",
        metavar="N",
        help="most draft tokens of a request in one step (default: %(default)s)",
        more="1 to 64.",
    )
    offer.setting(
        "--speculative-control",
        help="how many are drafted (default: %(default)s)",
        more="adaptive: as many as save time by measured acceptance and cost, down to none. fixed: always "
        "--speculative-num-tokens.",
    )
    offer.setting(
        "--speculative-verify",
        help="which drafts are accepted (default: %(default)s)",
        more="exact: those that keep the text. rejection, for draft and eagle: more of them; it keeps the distribution "
        "of sampled text, but not the text itself.",
    )


def _named_place(text: str) -> tuple[str, str]:
    name, sign, place = text.partition("=")
    if not sign:
        raise argparse.ArgumentTypeError(f"expected NAME=PACKAGE.MODULE:FUNCTION, got {text!r}")
    return name, place
