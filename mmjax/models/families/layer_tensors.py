"""Released tensors that many text families name alike: tables, and parts of a decoder layer."""

from collections.abc import Iterator

from mmjax.config import ModelConfig
from mmjax.models.families.released import LINEAR, SAME, Layout, ReleasedTensor, Shape, Slot, heads_of_two
from mmjax.models.layout import layer_address


def table_tensors(model: ModelConfig, root: str = "model", head: str = "lm_head") -> Iterator[ReleasedTensor]:
    """Embedding, last norm and, unless it is tied to the embedding, output head."""
    table = (model.vocabulary_size, model.width)
    yield ReleasedTensor(f"{root}.embed_tokens.weight", table, (Slot("decoder.embedding"),), SAME)
    yield ReleasedTensor(f"{root}.norm.weight", (model.width,), (Slot("decoder.norm"),), SAME)
    if not model.tied_head:
        yield ReleasedTensor(f"{head}.weight", table, (Slot("decoder.head"),), LINEAR)


class LayerTensors:
    """Tensors of decoder layer `layer` (from 0), whose released names begin with `released`."""

    def __init__(self, model: ModelConfig, layer: int, released: str):
        address = layer_address(model, layer)
        self.model, self.repeat, self.released = model, address.repeat, released
        self.ours = f"decoder.segments.{address.segment}.layers.{address.position}"

    def slot(self, path: str, *expert: int) -> Slot:
        return Slot(f"{self.ours}.{path}", (self.repeat, *expert))

    def tensor(self, name: str, shape: Shape, path: str, layout: Layout = LINEAR, *expert: int) -> ReleasedTensor:
        return ReleasedTensor(f"{self.released}.{name}", shape, (self.slot(path, *expert),), layout)

    def joined(self, name: str, shape: Shape, paths: tuple[str, ...], layout: Layout) -> ReleasedTensor:
        """One released tensor that fills several of our parameters."""
        return ReleasedTensor(f"{self.released}.{name}", shape, tuple(self.slot(path) for path in paths), layout)

    def norms(self) -> Iterator[ReleasedTensor]:
        """The two norms in front of the layer's mixer and MLP."""
        yield self.tensor("input_layernorm.weight", (self.model.width,), "input_norm", SAME)
        yield self.tensor("post_attention_layernorm.weight", (self.model.width,), "mlp_norm", SAME)

    def kimi_delta_attention(self) -> Iterator[ReleasedTensor]:
        """KDA but for its decay rates (`A_log`), which come in several shapes."""
        linear, width, name = self.model.linear_attention, self.model.width, "self_attn"
        keys, values = linear.num_heads * linear.key_width, linear.num_heads * linear.value_width
        for short, long, channels in (("q", "query", keys), ("k", "key", keys), ("v", "value", values)):
            yield self.tensor(f"{name}.{short}_proj.weight", (channels, width), f"mixer.{long}")
            taps = (channels, 1, linear.convolution_width)
            yield self.tensor(f"{name}.{short}_conv1d.weight", taps, f"mixer.{long}_convolution")
        yield self.tensor(f"{name}.f_a_proj.weight", (linear.decay_rank, width), "mixer.decay_down")
        yield self.tensor(f"{name}.f_b_proj.weight", (keys, linear.decay_rank), "mixer.decay_up")
        yield self.tensor(f"{name}.b_proj.weight", (linear.num_heads, width), "mixer.beta")
        if linear.output_gate == "full":
            yield self.tensor(f"{name}.g_proj.weight", (values, width), "mixer.output_gate")
        else:
            rank = linear.output_gate_rank
            yield self.tensor(f"{name}.g_a_proj.weight", (rank, width), "mixer.output_gate_down")
            yield self.tensor(f"{name}.g_b_proj.weight", (values, rank), "mixer.output_gate_up")
        yield self.tensor(f"{name}.dt_bias", (keys,), "mixer.decay_bias", SAME)
        yield self.tensor(f"{name}.o_norm.weight", (linear.value_width,), "mixer.output_norm", SAME)
        yield self.tensor(f"{name}.o_proj.weight", (width, values), "mixer.output")

    def latent_attention(self) -> Iterator[ReleasedTensor]:
        """MLA, and its indexer if it has one."""
        full, width, name = self.model.full_attention, self.model.width, "self_attn"
        queries, values = full.num_heads * full.key_width, full.num_heads * full.value_width
        if full.query_rank:
            yield self.tensor(f"{name}.q_a_proj.weight", (full.query_rank, width), "mixer.query_down")
            yield self.tensor(f"{name}.q_a_layernorm.weight", (full.query_rank,), "mixer.query_norm", SAME)
            yield self.tensor(f"{name}.q_b_proj.weight", (queries, full.query_rank), "mixer.query_up")
        else:
            yield self.tensor(f"{name}.q_proj.weight", (queries, width), "mixer.query")
        down = (full.latent_width + full.shared_key_width, width)
        yield self.tensor(f"{name}.kv_a_proj_with_mqa.weight", down, "mixer.latent_down")
        yield self.tensor(f"{name}.kv_a_layernorm.weight", (full.latent_width,), "mixer.latent_norm", SAME)
        yield self.joined(
            f"{name}.kv_b_proj.weight",
            (full.num_heads * (full.nope_width + full.value_width), full.latent_width),
            ("mixer.key_up", "mixer.value_up"),
            heads_of_two(full.nope_width),
        )
        if full.output_gate == "sigmoid":
            yield self.tensor(f"{name}.g_proj.weight", (values, width), "mixer.output_gate")
        yield self.tensor(f"{name}.o_proj.weight", (width, values), "mixer.output")
        if full.indexer.stage != "none":
            yield from self._indexer(f"{name}.indexer")

    def _indexer(self, name: str) -> Iterator[ReleasedTensor]:
        full, indexer = self.model.full_attention, self.model.full_attention.indexer
        queries = (indexer.num_heads * indexer.head_width, full.query_rank or self.model.width)
        vector = (indexer.head_width,)
        yield self.tensor(f"{name}.wq_b.weight", queries, "mixer.indexer.query_up")
        yield self.tensor(f"{name}.wk.weight", (*vector, self.model.width), "mixer.indexer.key")
        yield self.tensor(f"{name}.k_norm.weight", vector, "mixer.indexer.key_norm_scale", SAME)
        if indexer.key_norm_bias:
            yield self.tensor(f"{name}.k_norm.bias", vector, "mixer.indexer.key_norm_bias", SAME)
        weights = (indexer.num_heads, self.model.width)
        yield self.tensor(f"{name}.weights_proj.weight", weights, "mixer.indexer.head_weight")

    def dense_mlp(self, released: str, ours: str, hidden_width: int, *expert: int) -> Iterator[ReleasedTensor]:
        """`gate_proj`, `up_proj` and `down_proj`: of the layer, of its shared experts, or of one expert."""
        width = self.model.width
        for name, shape in (
            ("gate", (hidden_width, width)),
            ("up", (hidden_width, width)),
            ("down", (width, hidden_width)),
        ):
            yield self.tensor(f"{released}.{name}_proj.weight", shape, f"{ours}.{name}", LINEAR, *expert)

    def experts(self, released: str) -> Iterator[ReleasedTensor]:
        """All routed experts, one after the other, at the model width."""
        for expert in range(self.model.moe.num_experts):
            yield from self.dense_mlp(f"{released}.{expert}", "mlp", self.model.moe.expert_width, expert)
