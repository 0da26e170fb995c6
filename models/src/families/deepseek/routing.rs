//! The routing of DeepSeek, which selects experts from the best expert groups or from all experts.

use burn_megatron::nn::moe::{ExpertGroups, GroupScore, ScoreFunction};
use serde_json::{Value, json};

use crate::families::experts;
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MoeConfig, TransformerConfig};

/// The routing of a DeepSeek family.
pub(super) struct Routing {
    pub is_v3: bool,
    /// The value of `scoring_func`.
    scoring: &'static str,
    pub score: ScoreFunction,
    /// The value of `topk_method` if experts are selected from the best groups.
    with_groups: &'static str,
    group: GroupScore,
}

pub(super) const V2: Routing = Routing {
    is_v3: false,
    scoring: "softmax",
    score: ScoreFunction::PreSoftmax,
    with_groups: "group_limited_greedy",
    group: GroupScore::Max,
};

pub(super) const V3: Routing = Routing {
    is_v3: true,
    scoring: "sigmoid",
    score: ScoreFunction::Sigmoid,
    with_groups: "noaux_tc",
    group: GroupScore::SumOf(2),
};

impl Routing {
    pub fn read(&self, keys: &mut ConfigKeys) -> Result<MoeConfig, HfConfigError> {
        // These keys concern the router losses and the parallel layout.
        for key in ["aux_loss_alpha", "seq_aux", "ep_size"] {
            keys.take(key);
        }
        keys.only("moe_layer_freq", 1)?;
        keys.only("scoring_func", self.scoring)?;
        let per_token = keys.needed("num_experts_per_tok", ConfigKeys::size)?;
        if !self.is_v3 {
            // The class in `transformers` ignores the key, but the model code that was published with the weights reads
            // it.
            keys.only("norm_topk_prob", false)?;
        }
        let normalised = keys.flag("norm_topk_prob")?.unwrap_or(false);
        let width = keys.needed("moe_intermediate_size", ConfigKeys::size)?;
        let shared = keys.needed("n_shared_experts", ConfigKeys::size)?;
        Ok(MoeConfig {
            experts: keys.needed("n_routed_experts", ConfigKeys::size)?,
            experts_per_token: per_token,
            normalized: self
                .is_v3
                .then(|| experts::normalized(per_token, normalised))
                .flatten(),
            expert_width: Some(width),
            first_dense: keys.needed("first_k_dense_replace", ConfigKeys::count)?,
            score: self.score,
            factor: keys.needed("routed_scaling_factor", ConfigKeys::number)?,
            groups: self.groups(keys)?,
            // The expert biases stay constant unless a recipe sets an update rate.
            bias_update_rate: self.is_v3.then_some(0.0),
            shared_width: Some(width * shared),
            ..MoeConfig::default()
        })
    }

    pub fn write(&self, moe: &MoeConfig, model: &TransformerConfig) -> Value {
        let width = moe.width(model);
        let [groups, chosen] = moe.groups.map_or([1; 2], |it| [it.groups, it.chosen]);
        let method = match moe.groups {
            None if !self.is_v3 => "greedy",
            _ => self.with_groups,
        };
        json!({
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared_width.unwrap_or(0) / width,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": width,
            "first_k_dense_replace": moe.first_dense,
            "moe_layer_freq": 1,
            "n_group": groups,
            "topk_group": chosen,
            "topk_method": method,
            "scoring_func": self.scoring,
            "norm_topk_prob": self.is_v3 && moe.is_normalized(),
            "routed_scaling_factor": moe.factor,
        })
    }

    /// Returns the expert groups. Returns `None` if experts are selected from all groups, or if `topk_method` of
    /// DeepSeek-V2 ignores the groups.
    fn groups(&self, keys: &mut ConfigKeys) -> Result<Option<ExpertGroups>, HfConfigError> {
        let groups = keys.size("n_group")?;
        let chosen = keys.size("topk_group")?;
        if self.is_v3 {
            // The class in `transformers` does not read the key.
            keys.only("topk_method", self.with_groups)?;
        } else {
            let method = keys.needed("topk_method", ConfigKeys::text)?;
            if method == "greedy" {
                return Ok(None);
            }
            if method != self.with_groups {
                let fits = format!("greedy or {}", self.with_groups);
                return Err(keys.refused("topk_method", &json!(method), fits));
            }
        }
        let groups = groups.ok_or_else(|| keys.missing("n_group"))?;
        let chosen = chosen.ok_or_else(|| keys.missing("topk_group"))?;
        if chosen > groups {
            let fits = format!("at most n_group = {groups}");
            return Err(keys.refused("topk_group", &json!(chosen), fits));
        }
        // If all groups are selected, the selection is not limited.
        Ok((chosen < groups).then_some(ExpertGroups {
            groups,
            chosen,
            score: self.group,
        }))
    }
}
