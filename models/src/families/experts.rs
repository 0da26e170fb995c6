//! The keys that describe the experts of Mixtral, Qwen 3 and OLMoE.

use burn_megatron::nn::moe::ScoreFunction;
use serde_json::{Value, json};

use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MoeConfig, TransformerConfig};

/// The families whose keys describe experts.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ExpertKeys {
    /// Experts in every block, with normalized weights.
    Mixtral,
    /// Experts in every block.
    Olmoe,
    /// Experts with a separate width, in some blocks.
    Qwen3,
}

impl ExpertKeys {
    /// Returns the expert configuration of a small model of the family.
    pub fn defaults(self) -> MoeConfig {
        MoeConfig {
            score: match self {
                Self::Olmoe => ScoreFunction::PreSoftmax,
                Self::Mixtral | Self::Qwen3 => ScoreFunction::Softmax,
            },
            ..MoeConfig::default()
        }
    }
}

/// The keys for the number of experts. The first is used by Qwen 3 and OLMoE, and the second by Mixtral.
const EXPERTS: [&str; 2] = ["num_experts", "num_local_experts"];

pub(super) fn read(
    kind: ExpertKeys,
    keys: &mut ConfigKeys,
    layers: usize,
) -> Result<MoeConfig, HfConfigError> {
    let is_mixtral = kind == ExpertKeys::Mixtral;
    keys.only("router_jitter_noise", 0.0)?;
    let names = if is_mixtral { [EXPERTS[1]; 2] } else { EXPERTS };
    let [first, second] = names.map(|name| keys.size(name));
    let (first, second) = (first?, second?);
    if let (Some(first), Some(second)) = (first, second)
        && first != second
    {
        let fits = format!("{first}, as {}", names[0]);
        return Err(keys.refused(names[1], &json!(second), fits));
    }
    let experts = first.or(second).ok_or_else(|| keys.missing(names[0]))?;
    let experts_per_token = keys.needed("num_experts_per_tok", ConfigKeys::size)?;
    // Mixtral does not have this key.
    let normalised = is_mixtral || keys.needed("norm_topk_prob", ConfigKeys::flag)?;
    let moe = MoeConfig {
        experts,
        experts_per_token,
        score: match normalised {
            true => ScoreFunction::Softmax,
            false => ScoreFunction::PreSoftmax,
        },
        normalized: normalised
            .then(|| normalized(experts_per_token, true))
            .flatten(),
        ..MoeConfig::default()
    };
    if kind != ExpertKeys::Qwen3 {
        return Ok(moe);
    }
    let (every, dense) = blocks(keys, layers)?;
    let moe = MoeConfig {
        expert_width: Some(keys.needed("moe_intermediate_size", ConfigKeys::size)?),
        ..moe
    };
    Ok(moe.in_blocks(every, dense))
}

/// Returns the value of [`MoeConfig::normalized`], or `None` if `is_normalised` is the default.
pub(super) fn normalized(experts_per_token: usize, is_normalised: bool) -> Option<bool> {
    (is_normalised != (experts_per_token > 1)).then_some(is_normalised)
}

/// Returns the blocks with experts, as the arguments of [`MoeConfig::in_blocks`].
fn blocks(keys: &mut ConfigKeys, layers: usize) -> Result<(usize, usize), HfConfigError> {
    let step = keys.needed("decoder_sparse_step", ConfigKeys::size)?;
    let dense = keys.take("mlp_only_layers").unwrap_or_else(|| json!([]));
    let is_dense = |number: usize| {
        let listed = dense.as_array();
        listed.is_some_and(|listed| listed.contains(&json!(number)))
    };
    let sparse =
        (0..layers).filter(|number| (number + 1).is_multiple_of(step) && !is_dense(*number));
    let sparse: Vec<_> = sparse.collect();
    let first = sparse.first().copied().unwrap_or(layers);
    let every = match sparse.get(1) {
        Some(second) => second - first,
        // There is only one block with experts.
        None => (layers - first).max(1),
    };
    if dense.is_array() && (first..layers).step_by(every).eq(sparse.iter().copied()) {
        return Ok((every, first));
    }
    let fits = "layers after which the layers with experts are evenly spaced";
    Err(keys.refused("mlp_only_layers", &dense, fits))
}

pub(super) fn write(kind: ExpertKeys, moe: &MoeConfig, model: &TransformerConfig) -> Value {
    let dense = (0..model.layers).filter(|number| !moe.is_in(*number));
    let dense: Vec<_> = dense.collect();
    let normalized = moe.score == ScoreFunction::Softmax;
    let (experts, per_token) = (moe.experts, moe.experts_per_token);
    match kind {
        ExpertKeys::Mixtral => json!({
            EXPERTS[1]: experts,
            "num_experts_per_tok": per_token,
        }),
        ExpertKeys::Olmoe => json!({
            EXPERTS[0]: experts,
            "num_experts_per_tok": per_token,
            "norm_topk_prob": normalized,
        }),
        ExpertKeys::Qwen3 => json!({
            EXPERTS[0]: experts,
            "num_experts_per_tok": per_token,
            "norm_topk_prob": normalized,
            "moe_intermediate_size": moe.width(model),
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
        }),
    }
}
