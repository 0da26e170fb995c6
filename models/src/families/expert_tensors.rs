//! The tensors of routers and experts.

use super::ModelFamily;
use super::tensors::{MappingList, within};
use crate::hf::stored::mxfp4_names;
use crate::hf::{WeightEncoding, WeightMapping};
use crate::{MoeConfig, TransformerConfig};

/// The names of the linear layers of an MLP: gate, value and output.
const LINEARS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

/// The names and sizes of the experts of a block, in this crate and in the files.
struct Experts<'a> {
    /// The path of the experts in this crate.
    own: String,
    /// The name of the module in the files.
    theirs: String,
    moe: &'a MoeConfig,
    hidden: usize,
    /// The inner width of an expert.
    width: usize,
}

impl Experts<'_> {
    /// Returns the mapping of a tensor that has the shape of the parameter, or whose last two dimensions are swapped.
    fn tensor(&self, path: &str, name: &str, shape: &[usize], transposed: bool) -> WeightMapping {
        let [path, name] = within([&self.own, &self.theirs], path, name);
        WeightMapping {
            transposed,
            ..WeightMapping::whole(&path, &name, shape)
        }
    }
}

impl MappingList<'_> {
    /// Adds the router and the experts of a block.
    pub fn experts(
        &mut self,
        family: ModelFamily,
        [own, theirs]: [&str; 2],
        moe: &MoeConfig,
        config: &TransformerConfig,
    ) {
        let of_module = |module: &str| Experts {
            own: format!("{own}.moe"),
            theirs: format!("{theirs}.{module}"),
            moe,
            hidden: config.hidden,
            width: moe.width(config),
        };
        match family {
            ModelFamily::GptOss => self.packed_experts(&of_module("mlp")),
            // `transformers` 5 stores all experts in one tensor, in the module `mlp`.
            ModelFamily::Mixtral if !self.is_fused(&of_module("mlp")) => {
                self.routed_experts(&of_module("block_sparse_moe"), ["w1", "w3", "w2"])
            }
            _ => self.routed_experts(&of_module("mlp"), LINEARS),
        }
        if let Some(width) = moe.shared_width {
            let [own, theirs] = within([own, theirs], "moe.shared.mlp", "mlp.shared_experts");
            let both = [&own[..], &theirs];
            let [gate, value, output] = LINEARS;
            let parts = [(gate, width), (value, width)];
            self.linear(both, "up", config.hidden, &parts, false);
            let parts = [(output, config.hidden)];
            self.linear(both, "down", width, &parts, false);
        }
    }

    /// Returns whether the files store all experts in one tensor.
    fn is_fused(&self, experts: &Experts<'_>) -> bool {
        (self.has)(&format!("{}.experts.gate_up_proj", experts.theirs))
    }

    /// Adds a router and experts, whose gate and value projections are concatenated.
    fn routed_experts(&mut self, experts: &Experts<'_>, [gate, value, output]: [&str; 3]) {
        let Experts {
            moe, hidden, width, ..
        } = *experts;
        let router = [moe.experts, hidden];
        self.all
            .push(experts.tensor("router.gate", "gate.weight", &router, true));
        if moe.bias_update_rate.is_some() {
            let (path, name) = ("router.expert_bias", "gate.e_score_correction_bias");
            self.all.push(WeightMapping {
                keeps_type: true,
                ..experts.tensor(path, name, &[moe.experts], false)
            });
        }
        if self.is_fused(experts) {
            let up = [moe.experts, 2 * width, hidden];
            let down = [moe.experts, hidden, width];
            self.all.extend([
                experts.tensor("experts.up", "experts.gate_up_proj", &up, true),
                experts.tensor("experts.down", "experts.down_proj", &down, true),
            ]);
            return;
        }
        for expert in 0..moe.experts {
            let parts = [
                ("experts.up", gate, [width, hidden], 0),
                ("experts.up", value, [width, hidden], width),
                ("experts.down", output, [hidden, width], 0),
            ];
            self.all
                .extend(parts.map(|(path, name, shape, offset)| WeightMapping {
                    offset,
                    expert: Some(expert),
                    ..experts.tensor(
                        path,
                        &format!("experts.{expert}.{name}.weight"),
                        &shape,
                        true,
                    )
                }));
        }
    }

    /// Adds the experts of gpt-oss. All experts are in one tensor, the columns of gate and value projections are
    /// interleaved, and all layers have biases. Floating-point weights have the same orientation as in this crate, and
    /// MXFP4 weights are transposed.
    fn packed_experts(&mut self, experts: &Experts<'_>) {
        let Experts {
            moe, hidden, width, ..
        } = *experts;
        let count = moe.experts;
        let matrices = |path: &str, name: &str, [input, output]: [usize; 2]| {
            let full = format!("{}.{name}", experts.theirs);
            if mxfp4_names(&full).iter().any(|name| (self.has)(name)) {
                WeightMapping {
                    encoding: WeightEncoding::Mxfp4,
                    ..experts.tensor(path, name, &[count, output, input], true)
                }
            } else {
                experts.tensor(path, name, &[count, input, output], false)
            }
        };
        let interleaved = |mapping| WeightMapping {
            interleaved: true,
            ..mapping
        };
        let up = [hidden, 2 * width];
        let biases =
            |path: &str, name: &str, output| experts.tensor(path, name, &[count, output], false);
        let all = [
            experts.tensor("router.gate", "router.weight", &[count, hidden], true),
            experts.tensor("router.bias", "router.bias", &[count], false),
            interleaved(matrices("experts.up", "experts.gate_up_proj", up)),
            interleaved(biases(
                "experts.up_bias",
                "experts.gate_up_proj_bias",
                2 * width,
            )),
            matrices("experts.down", "experts.down_proj", [width, hidden]),
            biases("experts.down_bias", "experts.down_proj_bias", hidden),
        ];
        self.all.extend(all);
    }
}
