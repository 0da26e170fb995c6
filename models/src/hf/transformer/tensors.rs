//! The tensors of transformers.

use burn_megatron::nn::NormKind;

use super::ModelFamily;
use crate::hf::{HfFamily, WeightMapping};
use crate::{MoeConfig, Positions, TransformerConfig};

/// The tensors of a folder that `has` tensors of these names, in order of their use.
pub(super) fn tensors(
    family: ModelFamily,
    config: &TransformerConfig,
    has: &dyn Fn(&str) -> bool,
) -> Vec<WeightMapping> {
    let mut list = MappingList { all: vec![], has };
    let (names, shape) = (family.names(), [config.vocabulary, config.hidden]);
    list.whole("embedding.weight", names.embedding, &shape);
    if config.positions == Positions::Learned {
        let shape = [config.context, config.hidden];
        list.whole("positions.weight", "transformer.wpe.weight", &shape);
    }
    for layer in 0..config.layers {
        match family {
            ModelFamily::Gpt2 => list.gpt2_block(layer, config),
            _ => list.llama_block(family, layer, config),
        }
    }
    match family {
        ModelFamily::Gpt2 => list.norm("norm", "transformer.ln_f", config),
        _ => list.norm("norm", "model.norm", config),
    }
    if !config.tied {
        list.whole("output.weight", names.output, &shape);
    }
    list.all
}

/// The widths of queries, keys and values.
fn widths(config: &TransformerConfig) -> [usize; 3] {
    let width = config.head_width.unwrap_or(config.hidden / config.heads);
    let kv = config.groups() * width;
    [config.heads * width, kv, kv]
}

/// The names of a mixture of experts: its module in a block, and gate, value and output of an expert.
struct ExpertNames {
    module: &'static str,
    linears: [&'static str; 3],
}

const MIXTRAL: ExpertNames = ExpertNames {
    module: "block_sparse_moe",
    linears: ["w1", "w3", "w2"],
};

const QWEN3_MOE: ExpertNames = ExpertNames {
    module: "mlp",
    linears: ["gate_proj", "up_proj", "down_proj"],
};

struct MappingList<'a> {
    all: Vec<WeightMapping>,
    has: &'a dyn Fn(&str) -> bool,
}

impl MappingList<'_> {
    fn whole(&mut self, path: &str, name: &str, shape: &[usize]) {
        self.all.push(WeightMapping::whole(path, name, shape));
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

    fn llama_block(&mut self, family: ModelFamily, layer: usize, config: &TransformerConfig) {
        let (own, theirs) = (format!("blocks.{layer}"), format!("model.layers.{layer}"));
        let (hidden, width) = (config.hidden, config.mlp_width());
        let [q, k, v] = widths(config);
        let linear = |list: &mut Self, path: &str, input, parts: &[(&str, usize)], bias| {
            let named = parts
                .iter()
                .map(|(name, output)| (format!("{theirs}.{name}"), *output));
            let (path, parts) = (format!("{own}.{path}"), named.collect::<Vec<_>>());
            list.all
                .extend(WeightMapping::linear(&path, input, &parts, bias));
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
        if let Some(widths) = config.qk_norm_widths() {
            for (norm, width) in ["q_norm", "k_norm"].into_iter().zip(widths) {
                let path = format!("{own}.attention.{norm}.weight");
                let name = format!("{theirs}.self_attn.{norm}.weight");
                self.whole(&path, &name, &[width]);
            }
        }
        let parts = [("self_attn.o_proj", hidden)];
        linear(self, "attention.output", q, &parts, config.bias);
        if config.post_norms {
            norm(self, "attention_post_norm", "post_attention_layernorm");
            norm(self, "mlp_norm", "pre_feedforward_layernorm");
            norm(self, "mlp_post_norm", "post_feedforward_layernorm");
        } else {
            norm(self, "mlp_norm", "post_attention_layernorm");
        }
        if let Some(moe) = config.moe.as_ref().filter(|moe| moe.is_in(layer)) {
            let names = match family {
                ModelFamily::Mixtral => MIXTRAL,
                _ => QWEN3_MOE,
            };
            return self.experts([&own, &theirs], names, moe, config);
        }
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

    /// The router and the experts of a block, ours and theirs.
    fn experts(
        &mut self,
        [own, theirs]: [&str; 2],
        names: ExpertNames,
        moe: &MoeConfig,
        config: &TransformerConfig,
    ) {
        let own = format!("{own}.moe");
        let of_module = |module: &str| format!("{theirs}.{module}");
        let fused = |module: &str| format!("{module}.experts.gate_up_proj");
        // `transformers` 5 has the experts of Mixtral there too.
        let is_fused = |module: &String| (self.has)(&fused(module));
        let theirs = Some(of_module("mlp")).filter(is_fused);
        let theirs = theirs.unwrap_or_else(|| of_module(names.module));
        let (hidden, width) = (config.hidden, moe.width(config));
        let matrix = |path: &str, name: String, shape: &[usize]| WeightMapping {
            transposed: true,
            ..WeightMapping::whole(&format!("{own}.{path}"), &name, shape)
        };
        let gate = format!("{theirs}.gate.weight");
        self.all
            .push(matrix("router.gate", gate, &[moe.experts, hidden]));
        if is_fused(&theirs) {
            let up = [moe.experts, 2 * width, hidden];
            self.all.push(matrix("experts.up", fused(&theirs), &up));
            let (name, shape) = (
                format!("{theirs}.experts.down_proj"),
                [moe.experts, hidden, width],
            );
            self.all.push(matrix("experts.down", name, &shape));
            return;
        }
        let [gate, value, output] = names.linears;
        for expert in 0..moe.experts {
            let parts = [
                ("experts.up", gate, [width, hidden], 0),
                ("experts.up", value, [width, hidden], width),
                ("experts.down", output, [hidden, width], 0),
            ];
            let of_expert = |name: &str| format!("{theirs}.experts.{expert}.{name}.weight");
            self.all
                .extend(parts.map(|(path, name, shape, offset)| WeightMapping {
                    offset,
                    expert: Some(expert),
                    ..matrix(path, of_expert(name), &shape)
                }));
        }
    }
}
