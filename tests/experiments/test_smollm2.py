"""SmolLM2-135M-Instruct as `scripts/smollm2.sh` converts it, beside transformers' own reading of the same GGUF file."""

from pathlib import Path

import pytest

from mmjax import generate
from mmjax.checkpoint.verify import compare

FOLDER = Path(__file__).parents[2] / "data" / "smollm2"
GGUF = FOLDER / "downloads" / "SmolLM2-135M-Instruct.Q4_1.gguf"
PROMPT = "The capital of France is"
NEW_TOKENS = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (GGUF.exists() and (FOLDER / "model").exists()), reason="run scripts/smollm2.sh first"),
    # What PyTorch and transformers warn about is theirs.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(scope="module", autouse=True)
def _readers():
    for name in ("torch", "transformers", "gguf", "accelerate"):
        pytest.importorskip(name)


def test_logits_are_those_of_transformers_on_the_same_file():
    names, found = ([str(cell) for cell in column.cells] for column in compare(GGUF, FOLDER / "model").columns)
    values = dict(zip(names, map(float, found), strict=True))
    assert values["relative to the largest logit"] <= 1e-4
    assert values["same likeliest token"] == 1


def test_a_text_goes_on_as_in_transformers(capsys):
    import torch
    import transformers

    options = {"gguf_file": GGUF.name}
    network = transformers.AutoModelForCausalLM.from_pretrained(GGUF.parent, dtype=torch.float32, **options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(GGUF.parent, **options)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        tokens = network.generate(**prompt, max_new_tokens=NEW_TOKENS, do_sample=False)[
            0, prompt["input_ids"].shape[1] :
        ]
    expected = tokenizer.decode(tokens, skip_special_tokens=True)
    capsys.readouterr()
    length = ["--max-new-tokens", str(NEW_TOKENS)]
    assert generate.main([str(FOLDER / "model"), "--style", "text", "--prompt", PROMPT, *length]) == 0
    assert capsys.readouterr().out.rstrip("\n") == expected.rstrip("\n")
    assert "Paris" in expected
