"""Write the reference data for tests of the demo model: logits and held-out snippets."""

from __future__ import annotations

import random
from pathlib import Path

import click
import numpy as np
import torch
from demo_model.data import END_OF_TEXT, stdlib_sources
from demo_model.export import read_gguf
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

SNIPPETS, SHORTEST, LONGEST = 60, 200, 400


def snippets(sources: list[str]) -> list[str]:
    """Runs of whole lines, each beginning at a definition, spread over the held-out files."""
    found = []
    for source in sources:
        lines = source.splitlines(keepends=True)
        begin = 0
        while begin < len(lines):
            if lines[begin].lstrip().startswith(("def ", "class ")):
                text = ""
                for line in lines[begin:]:
                    if len(text) + len(line) > LONGEST:
                        break
                    text += line
                if len(text) >= SHORTEST and text.isascii():
                    found.append(text.rstrip("\n"))
                    begin += text.count("\n")
            begin += 1
    random.Random(0).shuffle(found)
    return found[:SNIPPETS]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--tokenizer",
    required=True,
    type=click.Path(exists=True, path_type=Path),
    help="The tokenizer.json that training left in its folder.",
)
@click.option("--logits", type=click.Path(path_type=Path), help="Write demo_logits.npz here.")
@click.option("--heldout", type=click.Path(path_type=Path), help="Write heldout.txt here.")
@click.option(
    "--tokens", default=64, show_default=True, help="Length of the prompt whose logits are kept."
)
@torch.no_grad()
def main(
    model: Path, tokenizer: Path, logits: Path | None, heldout: Path | None, tokens: int
) -> None:
    """Compute test vectors for MODEL, a demo GGUF.

    The weights are read back from the GGUF, so the cost of quantising them is in the vectors too:
    what llama.cpp computes from the same file differs by the rounding of activations alone.
    demo_logits.npz holds `tokens` [T], `logits` [T, V] of the main head as transformers computes it
    and `mtp_logits` [T - 1, V] of the MTP block's first step at positions 1 .. T - 1.
    """
    texts = snippets(stdlib_sources()[1])
    if heldout:
        heldout.write_text(f"\n{END_OF_TEXT}\n".join(texts) + "\n")
    if logits:
        demo = read_gguf(model)
        theirs = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**demo.cfg.to_transformers())).eval()
        theirs.load_state_dict(
            {n: w for n, w in demo.state_dict().items() if not n.startswith("mtp.")}
        )
        prompt = torch.tensor(
            Tokenizer.from_file(str(tokenizer)).encode("\n\n".join(texts)).ids[:tokens]
        )[None]
        output = theirs(input_ids=prompt, output_hidden_states=True)
        (draft,) = demo.drafts(prompt, output.hidden_states[-1], 1)
        np.savez_compressed(
            logits,
            tokens=prompt[0].numpy().astype(np.int32),
            logits=output.logits[0].numpy(),
            mtp_logits=demo.lm_head(draft)[0].numpy(),
        )
        same = demo.lm_head(draft).argmax(-1) == output.logits[:, 1:].argmax(-1)
        click.echo(f"{logits}: the MTP step agrees at {same.float().mean():.0%} of the positions")


if __name__ == "__main__":
    main()
