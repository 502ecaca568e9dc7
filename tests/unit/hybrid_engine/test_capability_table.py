"""The documentation's table says what the probe finds in the families that the tests build."""

from pathlib import Path

import pytest
import transformers as tf

from rlhf_app.hybrid_engine.capability import Capability, LayerAttention, probe
from rlhf_app.hybrid_engine.capability_table import has_experts, table
from rlhf_app.hybrid_engine.inference_model import InferenceModel
from rlhf_app.hybrid_engine.kv_workspace import LayerShape

DOCS = Path(__file__).parents[3] / "docs"
BEGIN, END = "<!-- families:begin -->\n", "<!-- families:end -->"


@pytest.mark.skipif(tf.__version__ < "5.24", reason="some families took up the interface in 5.24")
def test_documentation_holds_the_table_as_probed(build, families):
    rows = []
    for family in families:
        model = build(family)
        rows.append((family, probe(InferenceModel(model)), has_experts(model)))
    made = table(rows)
    documents = [text for path in DOCS.glob("*.md") if BEGIN in (text := path.read_text())]
    assert documents, f"no document in {DOCS} has the line {BEGIN}"
    for text in documents:
        block = text.split(BEGIN)[1].split(END)[0]
        assert block == made, f"put this between the marks:\n\n{made}"


def test_one_row_by_hand():
    shape = LayerShape(2, 8, 8)
    layers = [
        LayerAttention(8, 5, 2.0, False),
        LayerAttention(8, None, 2.0, False),
        LayerAttention(8, 5, 2.0, False),
    ]
    found = Capability((shape,) * 3, None, 64, None, tuple(layers), host_read="nonzero")
    assert table([("x", found, True)]).splitlines()[2] == (
        "| x | interface | 8 : 2 | 5 in 2 of 3 layers | 2 | - | the config's positions | yes | "
        "no: `nonzero` reads on the host |"
    )
    missing = Capability(missing="a thing")
    assert table([("y", missing, False)]).splitlines()[2] == (
        "| y | native: lacks a thing | - | - | - | - | any | - | - |"
    )


@pytest.mark.parametrize(
    ("family", "experts"), [("llama", False), ("mixtral", True), ("qwen2-moe", True)]
)
def test_experts_are_found(family, experts, build):
    assert has_experts(build(family)) == experts
