//! The tensors of a transformer, and their names in the files.

use burn_megatron::nn::NormKind;

use super::ModelFamily;
use crate::hf::{HfFamily, WeightMapping};
use crate::{MlaConfig, Positions, TransformerConfig};

/// Returns the mappings of the tensors of a folder, in the order in which the model uses them. `has` returns whether
/// the folder contains a tensor with a given name.
pub(super) fn tensors(
    family: ModelFamily,
    config: &TransformerConfig,
    has: &dyn Fn(&str) -> bool,
) -> Vec<WeightMapping> {
    let mut list = MappingList { all: vec![], has };
    let (names, shape) = (family.names(), [config.vocabulary, config.hidden]);
    list.whole(["embedding.weight", names.embedding], &shape);
    if config.positions == Positions::Learned {
        let shape = [config.context, config.hidden];
        list.whole(["positions.weight", "transformer.wpe.weight"], &shape);
    }
    for layer in 0..config.layers {
        match family {
            ModelFamily::Gpt2 => list.gpt2_block(layer, config),
            _ => {
                let (own, theirs) = (format!("blocks.{layer}"), format!("model.layers.{layer}"));
                list.llama_block(family, [&own, &theirs], layer, config);
            }
        }
    }
    let norm = match family {
        ModelFamily::Gpt2 => "transformer.ln_f",
        _ => "model.norm",
    };
    list.norm(["norm", norm], config);
    if !config.tied {
        list.whole(["output.weight", names.output], &shape);
    }
    list.further_tokens(family, config);
    list.all
}

/// Returns the total widths of the queries, the keys and the values.
fn widths(config: &TransformerConfig) -> [usize; 3] {
    let width = config.head_width.unwrap_or(config.hidden / config.heads);
    let kv = config.groups() * width;
    [config.heads * width, kv, kv]
}

/// A list of tensor mappings, to which the methods add the tensors of a model.
pub(super) struct MappingList<'a> {
    pub all: Vec<WeightMapping>,
    /// A function that returns whether the folder contains a tensor with the given name.
    pub has: &'a dyn Fn(&str) -> bool,
}

/// Returns the path of a part of a module in this crate, and its name in the files.
pub(super) fn within([own, theirs]: [&str; 2], path: &str, name: &str) -> [String; 2] {
    [format!("{own}.{path}"), format!("{theirs}.{name}")]
}

impl MappingList<'_> {
    fn whole(&mut self, [path, name]: [impl AsRef<str>; 2], shape: &[usize]) {
        let tensor = WeightMapping::whole(path.as_ref(), name.as_ref(), shape);
        self.all.push(tensor);
    }

    /// Adds the tensors of one or more PyTorch linear layers, which are concatenated into the linear layer at `path`.
    /// `parts` lists the names and output sizes of the PyTorch layers. `bias` states whether the layers have biases.
    pub fn linear(
        &mut self,
        [own, theirs]: [&str; 2],
        path: &str,
        input: usize,
        parts: &[(&str, usize)],
        bias: bool,
    ) {
        let named = parts
            .iter()
            .map(|(name, output)| (format!("{theirs}.{name}"), *output));
        let (path, parts) = (format!("{own}.{path}"), named.collect::<Vec<_>>());
        self.all
            .extend(WeightMapping::linear(&path, input, &parts, bias));
    }

    pub fn norm(&mut self, [own, theirs]: [impl AsRef<str>; 2], config: &TransformerConfig) {
        let (both, shape) = ([own.as_ref(), theirs.as_ref()], [config.hidden]);
        self.whole(within(both, "weight", "weight"), &shape);
        if config.norm == NormKind::Layer {
            self.whole(within(both, "bias", "bias"), &shape);
        }
    }

    /// Adds a block of GPT-2. In the files, its linear layers have the same layout as in this crate, and the query, key
    /// and value projections are one layer.
    fn gpt2_block(&mut self, layer: usize, config: &TransformerConfig) {
        let (own, theirs) = (format!("blocks.{layer}"), format!("transformer.h.{layer}"));
        let (both, hidden, width) = ([&own[..], &theirs], config.hidden, config.mlp_width());
        let linear = |list: &mut Self, path: &str, name: &str, input, output| {
            let [path, name] = within(both, path, name);
            let both = [&path[..], &name];
            list.whole(within(both, "weight", "weight"), &[input, output]);
            list.whole(within(both, "bias", "bias"), &[output]);
        };
        let norm = |list: &mut Self, path, name| list.norm(within(both, path, name), config);
        norm(self, "attention_norm", "ln_1");
        linear(self, "attention.qkv", "attn.c_attn", hidden, 3 * hidden);
        linear(self, "attention.output", "attn.c_proj", hidden, hidden);
        norm(self, "mlp_norm", "ln_2");
        linear(self, "mlp.up", "mlp.c_fc", hidden, width);
        linear(self, "mlp.down", "mlp.c_proj", width, hidden);
    }

    /// Adds the tensors of a block with the sizes of block `layer`. `both` contains the path of the block in this crate
    /// and its name in the files.
    pub fn llama_block(
        &mut self,
        family: ModelFamily,
        both: [&str; 2],
        layer: usize,
        config: &TransformerConfig,
    ) {
        let (hidden, width) = (config.hidden, config.mlp_width());
        let norm = |list: &mut Self, path, name| list.norm(within(both, path, name), config);
        norm(self, "attention_norm", "input_layernorm");
        match &config.mla {
            Some(mla) => self.latent_attention(both, mla, config),
            None => self.attention(both, config),
        }
        if config.post_norms {
            norm(self, "attention_post_norm", "post_attention_layernorm");
            norm(self, "mlp_norm", "pre_feedforward_layernorm");
            norm(self, "mlp_post_norm", "post_feedforward_layernorm");
        } else {
            norm(self, "mlp_norm", "post_attention_layernorm");
        }
        if let Some(moe) = config.moe.as_ref().filter(|moe| moe.is_in(layer)) {
            return self.experts(family, both, moe, config);
        }
        let parts = [("mlp.gate_proj", width), ("mlp.up_proj", width)];
        self.linear(both, "mlp.up", hidden, &parts, config.bias);
        let parts = [("mlp.down_proj", hidden)];
        self.linear(both, "mlp.down", width, &parts, config.bias);
    }

    fn attention(&mut self, both: [&str; 2], config: &TransformerConfig) {
        let hidden = config.hidden;
        let [q, k, v] = widths(config);
        let parts = [
            ("self_attn.q_proj", q),
            ("self_attn.k_proj", k),
            ("self_attn.v_proj", v),
        ];
        self.linear(both, "attention.qkv", hidden, &parts, config.has_qkv_bias());
        if let Some(widths) = config.qk_norm_widths() {
            for (norm, width) in ["q_norm", "k_norm"].into_iter().zip(widths) {
                let path = format!("attention.{norm}.weight");
                let name = format!("self_attn.{norm}.weight");
                self.whole(within(both, &path, &name), &[width]);
            }
        }
        if config.sinks {
            let sinks = within(both, "attention.sinks", "self_attn.sinks");
            self.whole(sinks, &[config.heads]);
        }
        let parts = [("self_attn.o_proj", hidden)];
        let bias = config.has_output_bias();
        self.linear(both, "attention.output", q, &parts, bias);
    }

    /// Adds the tensors of latent attention. Features with rotary position embedding are stored in pairs, as the layer
    /// expects them. Each head stores its keys, followed by its values.
    fn latent_attention(&mut self, both: [&str; 2], mla: &MlaConfig, config: &TransformerConfig) {
        let (hidden, heads) = (config.hidden, config.heads);
        let norm = |list: &mut Self, path: &str, name: &str, width: usize| {
            let (path, name) = (
                format!("mla.{path}.weight"),
                format!("self_attn.{name}.weight"),
            );
            list.whole(within(both, &path, &name), &[width]);
        };
        let queries = heads * mla.head_width();
        let latent = ("self_attn.kv_a_proj_with_mqa", mla.kv_rank + mla.rope_width);
        match mla.q_rank {
            None => {
                let parts = [("self_attn.q_proj", queries)];
                self.linear(both, "mla.query", hidden, &parts, false);
                self.linear(both, "mla.down", hidden, &[latent], false);
            }
            Some(rank) => {
                let parts = [("self_attn.q_a_proj", rank), latent];
                self.linear(both, "mla.down", hidden, &parts, false);
                norm(self, "query_norm", "q_a_layernorm", rank);
                let parts = [("self_attn.q_b_proj", queries)];
                self.linear(both, "mla.query_up", rank, &parts, false);
            }
        }
        norm(self, "kv_norm", "kv_a_layernorm", mla.kv_rank);
        let parts = [(
            "self_attn.kv_b_proj",
            heads * (mla.nope_width + mla.value_width),
        )];
        self.linear(both, "mla.kv_up", mla.kv_rank, &parts, false);
        let parts = [("self_attn.o_proj", hidden)];
        self.linear(both, "mla.output", heads * mla.value_width, &parts, false);
    }
}
