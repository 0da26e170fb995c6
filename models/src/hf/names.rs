//! Which tensor of a file is which part of a tensor of ours.

use burn_megatron::checkpoint::{MODEL, Slice};
use burn_megatron::nn::NormKind;

use super::Family;
use crate::{Positions, TransformerConfig};

/// Bytes that are read at once where tensors are copied.
pub(super) const CHUNK: usize = 64 << 20;

/// A tensor of a file of Hugging Face, as a part of one of ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mapped {
    /// Its name there.
    pub name: String,
    /// Its shape there.
    pub shape: Vec<usize>,
    /// The key of ours.
    pub key: String,
    /// Where it begins along our last dim.
    pub at: usize,
    /// Whether its two dims are exchanged.
    pub transposed: bool,
}

impl Mapped {
    /// Its shape as a part of ours.
    pub fn own_shape(&self) -> Vec<usize> {
        match self.transposed {
            true => self.shape.iter().rev().copied().collect(),
            false => self.shape.clone(),
        }
    }
}

impl Mapped {
    /// The boxes of ours in which it is read and written, one after the other: rows of the file, of
    /// elements of `size` bytes, at most `most` bytes at once unless a single row has more.
    pub fn boxes(&self, size: usize, most: usize) -> Vec<Slice> {
        let mut whole = Slice::whole(&self.own_shape());
        let last = whole.shape.len() - 1;
        whole.offset[last] = self.at;
        let dim = if self.transposed { last } else { 0 };
        let rows = self.shape[0];
        let row = self.shape[1..].iter().product::<usize>() * size;
        let step = (most / row).max(1);
        let stretch = |first: usize| {
            let mut stretch = whole.clone();
            stretch.offset[dim] += first;
            stretch.shape[dim] = step.min(rows - first);
            stretch
        };
        (0..rows).step_by(step).map(stretch).collect()
    }
}

/// What names of a family begin with, but for those of the output layer. Files of the decoder alone
/// leave it out.
pub(super) fn prefix(family: Family) -> &'static str {
    match family {
        Family::Gpt2 => "transformer.",
        _ => "model.",
    }
}

/// The output layer, in every family.
pub(super) const OUTPUT: &str = "lm_head.weight";

/// The embedding.
pub(super) fn embedding(family: Family) -> &'static str {
    match family {
        Family::Gpt2 => "transformer.wte.weight",
        _ => "model.embed_tokens.weight",
    }
}

/// Tables that old files have beside the weights.
pub(super) fn is_no_weight(name: &str) -> bool {
    let tables = [".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq"];
    tables.iter().any(|table| name.ends_with(table))
}

/// All tensors of a model, in the order in which they are used.
pub(super) fn mapped(family: Family, config: &TransformerConfig) -> Vec<Mapped> {
    let mut list = List(vec![]);
    let (hidden, vocabulary) = (config.hidden, config.vocabulary);
    list.whole("embedding.weight", embedding(family), &[vocabulary, hidden]);
    if config.positions == Positions::Learned {
        let shape = [config.context, hidden];
        list.whole("positions.weight", "transformer.wpe.weight", &shape);
    }
    for layer in 0..config.layers {
        match family {
            Family::Gpt2 => list.gpt2_block(layer, config),
            _ => list.llama_block(layer, config),
        }
    }
    match family {
        Family::Gpt2 => list.norm("norm", "transformer.ln_f", config),
        _ => list.norm("norm", "model.norm", config),
    }
    if !config.tied {
        list.whole("output.weight", OUTPUT, &[vocabulary, hidden]);
    }
    list.0
}

/// The features of queries, of keys and of values.
fn widths(config: &TransformerConfig) -> [usize; 3] {
    let width = config.head_width.unwrap_or(config.hidden / config.heads);
    let kv = config.groups() * width;
    [config.heads * width, kv, kv]
}

struct List(Vec<Mapped>);

impl List {
    /// A tensor that is laid alike.
    fn whole(&mut self, path: &str, name: &str, shape: &[usize]) {
        self.0.push(Mapped {
            name: name.into(),
            shape: shape.to_vec(),
            key: format!("{MODEL}{path}"),
            at: 0,
            transposed: false,
        });
    }

    /// Linear layers that are one of ours, side by side: `weight` and, if there are any, `bias`.
    fn linear(&mut self, path: &str, input: usize, parts: &[(String, usize)], bias: bool) {
        let mut add = |what: &str, shape: &dyn Fn(usize) -> Vec<usize>| {
            let mut at = 0;
            for (name, output) in parts {
                self.0.push(Mapped {
                    name: format!("{name}.{what}"),
                    shape: shape(*output),
                    key: format!("{MODEL}{path}.{what}"),
                    at,
                    transposed: what == "weight",
                });
                at += output;
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

    /// Its linear layers are laid as ours, and queries, keys and values are one already.
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
            let named = parts.iter();
            let named = named.map(|(name, output)| (format!("{theirs}.{name}"), *output));
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
        let mapped = |transposed| Mapped {
            name: "weight".into(),
            shape: vec![5, 3],
            key: "model/weight".into(),
            at: 4,
            transposed,
        };
        let slice = |offset: [usize; 2], shape: [usize; 2]| Slice {
            offset: offset.to_vec(),
            shape: shape.to_vec(),
        };
        // Two rows of three elements of 4 bytes, and a single one where not even that fits.
        let turned = [([0, 4], [3, 2]), ([0, 6], [3, 2]), ([0, 8], [3, 1])];
        assert_eq!(
            mapped(true).boxes(4, 30),
            turned.map(|(at, shape)| slice(at, shape))
        );
        let plain = [([0, 4], [2, 3]), ([2, 4], [2, 3]), ([4, 4], [1, 3])];
        assert_eq!(
            mapped(false).boxes(4, 30),
            plain.map(|(at, shape)| slice(at, shape))
        );
        assert_eq!(mapped(true).boxes(4, 1).len(), 5);
        assert_eq!(mapped(true).boxes(4, CHUNK), [slice([0, 4], [3, 5])]);
    }
}
