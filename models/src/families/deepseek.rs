//! DeepSeek-V2: latent attention, and shared experts in addition to routed experts, which are chosen from the best groups or
//! from all. DeepSeek-V3 chooses them by sigmoids and biases.

use burn_megatron::nn::moe::{ExpertGroups, GroupScore, ScoreFunction};
use serde_json::{Map, Value, json};

use super::activation::{self, GATED};
use super::{Conditions, Family, experts, map, rope, sizes};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MlaConfig, MoeConfig, MtpConfig, Positions, RotaryScaling, TransformerConfig};

/// The epsilon of the norms of latents, which no key sets.
const LATENT_EPSILON: f64 = 1e-6;

/// The routing of a family.
pub(super) struct Deepseek {
    is_v3: bool,
    /// The value of `scoring_func`.
    scoring: &'static str,
    score: ScoreFunction,
    /// The value of `topk_method` with groups.
    with_groups: &'static str,
    group: GroupScore,
}

pub(super) const V2: Deepseek = Deepseek {
    is_v3: false,
    scoring: "softmax",
    score: ScoreFunction::PreSoftmax,
    with_groups: "group_limited_greedy",
    group: GroupScore::Max,
};

pub(super) const V3: Deepseek = Deepseek {
    is_v3: true,
    scoring: "sigmoid",
    score: ScoreFunction::Sigmoid,
    with_groups: "noaux_tc",
    group: GroupScore::SumOf(2),
};

impl Family for Deepseek {
    fn defaults(&self) -> TransformerConfig {
        let v3 = TransformerConfig::deepseek();
        if self.is_v3 {
            return v3;
        }
        TransformerConfig {
            // As in DeepSeek-V2-Lite. A recipe could not remove a rank that the family has.
            mla: v3.mla.map(|mla| MlaConfig {
                q_rank: None,
                ..mla
            }),
            moe: v3.moe.map(|moe| MoeConfig {
                score: self.score,
                factor: 1.0,
                groups: None,
                bias_update_rate: None,
                ..moe
            }),
            ..v3
        }
    }

    fn read(&self, keys: &mut ConfigKeys) -> Result<TransformerConfig, HfConfigError> {
        let sizes = sizes::read(keys, TransformerConfig::deepseek())?;
        let mla = latents(keys)?;
        // Heads do not share keys and values. The width is the width of the rotated part.
        keys.only("num_key_value_heads", sizes.heads)?;
        keys.only("head_dim", mla.rope_width)?;
        keys.only("qk_head_dim", mla.head_width())?;
        // Only the order of the computation depends on it.
        keys.take("pretraining_tp");
        keys.only("attention_bias", false)?;
        keys.only("mlp_bias", false)?;
        keys.not_null(
            "rope_interleave",
            "true, as transformers reads null as false",
        )?;
        keys.only("rope_interleave", true)?;
        // By its old or new name.
        let depths = keys.count("num_nextn_predict_layers")?;
        let depths = keys.count("num_mtp_layers")?.or(depths).unwrap_or(0);
        Ok(TransformerConfig {
            activation: activation::read(keys, "hidden_act", GATED)?,
            positions: rope::read(keys, sizes.context, true)?,
            mla: Some(mla),
            moe: Some(self.routed(keys)?),
            mtp: (depths > 0).then(|| MtpConfig {
                layers: depths,
                ..MtpConfig::default()
            }),
            ..sizes
        })
    }

    fn conditions(&self, model: &TransformerConfig) -> Conditions {
        let has_both = match &model.positions {
            Positions::Rotary {
                scaling:
                    RotaryScaling::Yarn {
                        mscale,
                        mscale_all_dim,
                        ..
                    },
                ..
            } => *mscale_all_dim == 0.0 || *mscale != 0.0,
            _ => true,
        };
        vec![
            (
                "mla and experts",
                model.mla.is_some() && model.moe.is_some(),
            ),
            activation::condition(model, GATED),
            ("mscale next to mscale_all_dim in YaRN scaling", has_both),
        ]
    }

    fn write(&self, model: &TransformerConfig) -> Map<String, Value> {
        let (Some(mla), Some(moe)) = (&model.mla, &model.moe) else {
            return Map::new();
        };
        let width = moe.width(model);
        let method = match moe.groups {
            None if !self.is_v3 => "greedy",
            _ => self.with_groups,
        };
        let mut keys = sizes::write(model);
        keys.extend(map(json!({
            "hidden_act": activation::name(model, GATED),
            "attention_bias": false,
            "q_lora_rank": mla.q_rank,
            "kv_lora_rank": mla.kv_rank,
            "qk_nope_head_dim": mla.nope_width,
            "qk_rope_head_dim": mla.rope_width,
            "v_head_dim": mla.value_width,
            "n_routed_experts": moe.experts,
            "n_shared_experts": moe.shared_width.unwrap_or(0) / width,
            "num_experts_per_tok": moe.experts_per_token,
            "moe_intermediate_size": width,
            "first_k_dense_replace": moe.first_dense,
            "moe_layer_freq": 1,
            "n_group": moe.groups.map_or(1, |groups| groups.groups),
            "topk_group": moe.groups.map_or(1, |groups| groups.chosen),
            "topk_method": method,
            "scoring_func": self.scoring,
            "norm_topk_prob": self.is_v3 && moe.is_normalized(),
            "routed_scaling_factor": moe.factor,
        })));
        if self.is_v3 {
            let depths = model.mtp.as_ref().map_or(0, |mtp| mtp.layers);
            keys.insert("num_nextn_predict_layers".into(), json!(depths));
            keys.insert("rope_interleave".into(), json!(true));
        }
        keys
    }
}

impl Deepseek {
    fn routed(&self, keys: &mut ConfigKeys) -> Result<MoeConfig, HfConfigError> {
        // They belong to the loss of the routers and to the layout.
        for key in ["aux_loss_alpha", "seq_aux", "ep_size"] {
            keys.take(key);
        }
        keys.only("moe_layer_freq", 1)?;
        keys.only("scoring_func", self.scoring)?;
        let per_token = keys.needed("num_experts_per_tok", ConfigKeys::size)?;
        if !self.is_v3 {
            // The class of transformers ignores the key, the code next to the published weights does not.
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
            // The biases stay as they are unless a recipe has a rate.
            bias_update_rate: self.is_v3.then_some(0.0),
            shared_width: Some(width * shared),
            ..MoeConfig::default()
        })
    }

    /// Returns the groups of experts, or `None` if all are chosen or V2's `topk_method` ignores them.
    fn groups(&self, keys: &mut ConfigKeys) -> Result<Option<ExpertGroups>, HfConfigError> {
        let groups = keys.size("n_group")?;
        let chosen = keys.size("topk_group")?;
        if self.is_v3 {
            // The class of transformers does not read the key.
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
        // Without a limit if all groups are chosen.
        Ok((chosen < groups).then_some(ExpertGroups {
            groups,
            chosen,
            score: self.group,
        }))
    }
}

fn latents(keys: &mut ConfigKeys) -> Result<MlaConfig, HfConfigError> {
    Ok(MlaConfig {
        q_rank: keys.size("q_lora_rank")?,
        kv_rank: keys.needed("kv_lora_rank", ConfigKeys::size)?,
        nope_width: keys.needed("qk_nope_head_dim", ConfigKeys::size)?,
        rope_width: keys.needed("qk_rope_head_dim", ConfigKeys::size)?,
        value_width: keys.needed("v_head_dim", ConfigKeys::size)?,
        norm_epsilon: LATENT_EPSILON,
    })
}
