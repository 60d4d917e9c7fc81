"""A small real tokenizer, grammars for it, and whether an output obeys its grammar. For the engines of the test models.

The tokenizer is a byte-level BPE made on the spot: it needs no download, and a test model's whole vocabulary is wide enough.
Model weights are random there, so that what a request with a grammar says, it says because of the grammar's bitmask.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

BOS, EOS = 0, 1
WORDS = ["red", "green", "blue", "very dark blue"]
SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": WORDS},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 1, "maxItems": 3},
        "round": {"type": "boolean"},
    },
    "required": ["colour", "sizes", "round"],
    "additionalProperties": False,
}
PATTERN = r"(ab|cde)[0-9]{2,6}(-[a-f0-9]{3}){1,3}"
GRAMMAR = 'root ::= item ("+" item)* ";"\nitem ::= "f(" [a-c]+ ")" | [0-9] [0-9]'
GRAMMAR_AS_PATTERN = r"(f\([a-c]+\)|[0-9]{2})(\+(f\([a-c]+\)|[0-9]{2}))*;"
KINDS: list[dict[str, Any]] = [{"json": SCHEMA}, {"regex": PATTERN}, {"choice": WORDS}, {"grammar": GRAMMAR}]


def save_tokenizer(folder: Path) -> Any:
    """Make the tokenizer in ``folder`` (ids 0 and 1 begin and end a text) and return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    text = [*WORDS, json.dumps(SCHEMA), "true false null 10 12 100 -1 cde f(abc) f(c)+f(ab); -a0f-00b"]
    tokenizer.train_from_iterator(text * 3, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    made.save_pretrained(folder)
    return made


def obeys(kind: dict[str, Any], text: str) -> bool:
    """Whether ``text`` is all that ``kind`` asks for, judged without the library that made the bitmasks."""
    if "json" in kind:
        import jsonschema

        try:
            jsonschema.validate(json.loads(text), kind["json"])
        except (ValueError, jsonschema.ValidationError):
            return False
        return True
    if "choice" in kind:
        return text in kind["choice"]
    return re.fullmatch(kind.get("regex", GRAMMAR_AS_PATTERN), text) is not None


def accepted(kind: dict[str, Any], tokenizer: Any, vocab_size: int, tokens: list[int]) -> int:
    """How many of ``tokens`` the grammar accepts one after the other: of an output that was cut short."""
    import xgrammar
    from vllm.v1.structured_output.utils import choice_as_grammar

    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size))
    if "json" in kind:
        compiled = compiler.compile_json_schema(json.dumps(kind["json"]))
    elif "regex" in kind:
        compiled = compiler.compile_regex(kind["regex"])
    else:
        compiled = compiler.compile_grammar(kind.get("grammar") or choice_as_grammar(kind["choice"]))
    matcher = xgrammar.GrammarMatcher(compiled)
    for number, token in enumerate(tokens):
        if matcher.is_terminated() or not matcher.accept_token(token):
            return number
    return len(tokens)
