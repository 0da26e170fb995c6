//! Maps tensors of Hugging Face files to parts of our tensors.

use burn_megatron::checkpoint::{MODEL, TensorSlice};
use burn_megatron::nn::NormKind;

use super::ModelFamily;
use crate::{Positions, TransformerConfig};

/// The most bytes that are read at once when tensors are copied.
pub(super) const CHUNK: usize = 64 << 20;

/// Maps a tensor of a Hugging Face file to a part of one of our tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WeightMapping {
    /// Its name in the file.
    pub name: String,
    /// Its shape in the file.
    pub shape: Vec<usize>,
    /// The key of our tensor.
    pub key: String,
    /// Its offset along the last dim of our tensor.
    pub offset: usize,
    /// Whether its two dims are transposed.
    pub transposed: bool,
}

impl WeightMapping {
    /// Its shape as a part of our tensor.
    pub fn own_shape(&self) -> Vec<usize> {
        if self.transposed {
            self.shape.iter().rev().copied().collect()
        } else {
            self.shape.clone()
        }
    }
}

impl WeightMapping {
    /// The slices of our tensor in which it is copied: rows of the file with elements of `size` bytes, at most
    /// `most` bytes at once unless a single row has more.
    pub fn slices(&self, size: usize, most: usize) -> Vec<TensorSlice> {
        let mut whole = TensorSlice::whole(&self.own_shape());
        let last = whole.shape.len() - 1;
        whole.offset[last] = self.offset;
        let dim = if self.transposed { last } else { 0 };
        let rows = self.shape[0];
        let row = self.shape[1..].iter().product::<usize>() * size;
        let step = (most / row).max(1);
        let rows_from = |first: usize| {
            let mut slice = whole.clone();
            slice.offset[dim] += first;
            slice.shape[dim] = step.min(rows - first);
            slice
        };
        (0..rows).step_by(step).map(rows_from).collect()
    }
}

/// The prefix of a family's tensor names, except for the output layer. Files of the decoder alone leave it
/// out.
pub(super) fn prefix(family: ModelFamily) -> &'static str {
    match family {
        ModelFamily::Gpt2 => "transformer.",
        _ => "model.",
    }
}

/// The name of the output layer's weight in every family.
pub(super) const OUTPUT: &str = "lm_head.weight";

/// The name of the embedding's weight.
pub(super) fn embedding(family: ModelFamily) -> &'static str {
    match family {
        ModelFamily::Gpt2 => "transformer.wte.weight",
        _ => "model.embed_tokens.weight",
    }
}

/// Whether this is a table of old files, which is not a weight.
pub(super) fn is_no_weight(name: &str) -> bool {
    let tables = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
    tables.iter().any(|table| name.ends_with(table))
}

/// The mappings of all tensors of a model, in order of their use.
pub(super) fn mapped(family: ModelFamily, config: &TransformerConfig) -> Vec<WeightMapping> {
    let mut list = MappingList(vec![]);
    let (hidden, vocabulary) = (config.hidden, config.vocabulary);
    list.whole("embedding.weight", embedding(family), &[vocabulary, hidden]);
    if config.positions == Positions::Learned {
        let shape = [config.context, hidden];
        list.whole("positions.weight", "transformer.wpe.weight", &shape);
    }
    for layer in 0..config.layers {
        match family {
            ModelFamily::Gpt2 => list.gpt2_block(layer, config),
            _ => list.llama_block(layer, config),
        }
    }
    match family {
        ModelFamily::Gpt2 => list.norm("norm", "transformer.ln_f", config),
        _ => list.norm("norm", "model.norm", config),
    }
    if !config.tied {
        list.whole("output.weight", OUTPUT, &[vocabulary, hidden]);
    }
    list.0
}

/// The widths of queries, keys and values.
fn widths(config: &TransformerConfig) -> [usize; 3] {
    let width = config.head_width.unwrap_or(config.hidden / config.heads);
    let kv = config.groups() * width;
    [config.heads * width, kv, kv]
}

struct MappingList(Vec<WeightMapping>);

impl MappingList {
    /// A tensor with the same layout.
    fn whole(&mut self, path: &str, name: &str, shape: &[usize]) {
        self.0.push(WeightMapping {
            name: name.into(),
            shape: shape.to_vec(),
            key: format!("{MODEL}{path}"),
            offset: 0,
            transposed: false,
        });
    }

    /// Linear layers that are concatenated in ours: `weight` and optionally `bias`.
    fn linear(&mut self, path: &str, input: usize, parts: &[(String, usize)], bias: bool) {
        let mut add = |what: &str, shape: &dyn Fn(usize) -> Vec<usize>| {
            let mut offset = 0;
            for (name, output) in parts {
                self.0.push(WeightMapping {
                    name: format!("{name}.{what}"),
                    shape: shape(*output),
                    key: format!("{MODEL}{path}.{what}"),
                    offset,
                    transposed: what == "weight",
                });
                offset += output;
            }
        };
        add("weight", &|output| vec![output, input]);
        if bias {
            add("bias", &|output| vec![output]);
        }
    }

    fn norm(&mut self, path: &str, name: &str, config: &TransformerConfig) {
        let mut add = |what: &str| {
            let (path, name) = (format!("{path}.{what}"), format!("{name}.{what}"));
            self.whole(&path, &name, &[config.hidden]);
        };
        add("weight");
        if config.norm == NormKind::Layer {
            add("bias");
        }
    }

    /// GPT-2's linear layers have our layout, with joint queries, keys and values.
    fn gpt2_block(&mut self, layer: usize, config: &TransformerConfig) {
        let (own, theirs) = (format!("blocks.{layer}"), format!("transformer.h.{layer}"));
        let (hidden, width) = (config.hidden, config.mlp_width());
        let linear = |list: &mut Self, path: &str, name: &str, input, output| {
            let (path, name) = (format!("{own}.{path}"), format!("{theirs}.{name}"));
            list.whole(
                &format!("{path}.weight"),
                &format!("{name}.weight"),
                &[input, output],
            );
            list.whole(&format!("{path}.bias"), &format!("{name}.bias"), &[output]);
        };
        let norm = |list: &mut Self, path: &str, name: &str| {
            list.norm(
                &format!("{own}.{path}"),
                &format!("{theirs}.{name}"),
                config,
            );
        };
        norm(self, "attention_norm", "ln_1");
        linear(self, "attention.qkv", "attn.c_attn", hidden, 3 * hidden);
        linear(self, "attention.output", "attn.c_proj", hidden, hidden);
        norm(self, "mlp_norm", "ln_2");
        linear(self, "mlp.up", "mlp.c_fc", hidden, width);
        linear(self, "mlp.down", "mlp.c_proj", width, hidden);
    }

    fn llama_block(&mut self, layer: usize, config: &TransformerConfig) {
        let (own, theirs) = (format!("blocks.{layer}"), format!("model.layers.{layer}"));
        let (hidden, width) = (config.hidden, config.mlp_width());
        let [q, k, v] = widths(config);
        let linear = |list: &mut Self, path: &str, input, parts: &[(&str, usize)], bias| {
            let named = parts
                .iter()
                .map(|(name, output)| (format!("{theirs}.{name}"), *output));
            let parts: Vec<_> = named.collect();
            list.linear(&format!("{own}.{path}"), input, &parts, bias);
        };
        let norm = |list: &mut Self, path: &str, name: &str| {
            list.norm(
                &format!("{own}.{path}"),
                &format!("{theirs}.{name}"),
                config,
            );
        };
        norm(self, "attention_norm", "input_layernorm");
        let parts = [
            ("self_attn.q_proj", q),
            ("self_attn.k_proj", k),
            ("self_attn.v_proj", v),
        ];
        let qkv_bias = config.qkv_bias.unwrap_or(config.bias);
        linear(self, "attention.qkv", hidden, &parts, qkv_bias);
        if config.qk_norm {
            for norm in ["q_norm", "k_norm"] {
                let path = format!("{own}.attention.{norm}.weight");
                let name = format!("{theirs}.self_attn.{norm}.weight");
                self.whole(&path, &name, &[q / config.heads]);
            }
        }
        let parts = [("self_attn.o_proj", hidden)];
        linear(self, "attention.output", q, &parts, config.bias);
        norm(self, "mlp_norm", "post_attention_layernorm");
        let parts = [("mlp.gate_proj", width), ("mlp.up_proj", width)];
        linear(self, "mlp.up", hidden, &parts, config.bias);
        linear(
            self,
            "mlp.down",
            width,
            &[("mlp.down_proj", hidden)],
            config.bias,
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boxes_are_rows_of_the_file() {
        let mapped = |transposed| WeightMapping {
            name: "weight".into(),
            shape: vec![5, 3],
            key: "model/weight".into(),
            offset: 4,
            transposed,
        };
        let slice = |offset: [usize; 2], shape: [usize; 2]| TensorSlice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        // Two rows of three elements of 4 bytes, and one row if not even that fits.
        let turned = [([0, 4], [3, 2]), ([0, 6], [3, 2]), ([0, 8], [3, 1])];
        assert_eq!(
            mapped(true).slices(4, 30),
            turned.map(|(at, shape)| slice(at, shape))
        );
        let plain = [([0, 4], [2, 3]), ([2, 4], [2, 3]), ([4, 4], [1, 3])];
        assert_eq!(
            mapped(false).slices(4, 30),
            plain.map(|(at, shape)| slice(at, shape))
        );
        assert_eq!(mapped(true).slices(4, 1).len(), 5);
        assert_eq!(mapped(true).slices(4, CHUNK), [slice([0, 4], [3, 5])]);
    }
}
