//! DeepSeek-V2 has latent attention, and shared experts in addition to routed experts. Experts are chosen from the best
//! groups or from all experts. DeepSeek-V3 chooses them with sigmoids and biases.

use serde_json::{Map, Value, json};

use super::activation::{self, GATED};
use super::{Conditions, Family, map, rope, sizes};
use crate::hf::{ConfigKeys, HfConfigError};
use crate::{MlaConfig, MoeConfig, MtpConfig, Positions, RotaryScaling, TransformerConfig};

mod routing;

use routing::Routing;

/// The epsilon of the norms of latents, which no key sets.
const LATENT_EPSILON: f64 = 1e-6;

/// A DeepSeek family, with its routing.
pub(super) struct Deepseek(Routing);

pub(super) const V2: Deepseek = Deepseek(routing::V2);

pub(super) const V3: Deepseek = Deepseek(routing::V3);

impl Family for Deepseek {
    fn defaults(&self) -> TransformerConfig {
        let v3 = TransformerConfig::deepseek();
        if self.0.is_v3 {
            return v3;
        }
        TransformerConfig {
            // As in DeepSeek-V2-Lite. A recipe could not remove a rank that the defaults of the family have.
            mla: v3.mla.map(|mla| MlaConfig {
                q_rank: None,
                ..mla
            }),
            moe: v3.moe.map(|moe| MoeConfig {
                score: self.0.score,
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
        // It only affects the order of the computation.
        keys.take("pretraining_tp");
        keys.only("attention_bias", false)?;
        keys.only("mlp_bias", false)?;
        keys.not_null(
            "rope_interleave",
            "true, because transformers reads null as false",
        )?;
        keys.only("rope_interleave", true)?;
        // The key has an old and a new name.
        let depths = keys.count("num_nextn_predict_layers")?;
        let depths = keys.count("num_mtp_layers")?.or(depths).unwrap_or(0);
        Ok(TransformerConfig {
            activation: activation::read(keys, "hidden_act", GATED)?,
            positions: rope::read(keys, sizes.context, true)?,
            mla: Some(mla),
            moe: Some(self.0.read(keys)?),
            mtp: (depths > 0).then(|| MtpConfig {
                layers: depths,
                ..MtpConfig::default()
            }),
            ..sizes
        })
    }

    fn conditions(&self, model: &TransformerConfig) -> Conditions {
        let lacks_mscale = matches!(
            model.positions,
            Positions::Rotary {
                scaling: RotaryScaling::Yarn { mscale, mscale_all_dim, .. },
                ..
            } if mscale_all_dim != 0.0 && mscale == 0.0
        );
        vec![
            (
                "mla and experts",
                model.mla.is_some() && model.moe.is_some(),
            ),
            activation::condition(model, GATED),
            (
                "mscale next to mscale_all_dim in YaRN scaling",
                !lacks_mscale,
            ),
        ]
    }

    fn write(&self, model: &TransformerConfig) -> Map<String, Value> {
        let (Some(mla), Some(moe)) = (&model.mla, &model.moe) else {
            return Map::new();
        };
        let own = json!({
            "hidden_act": activation::name(model, GATED),
            "attention_bias": false,
            "q_lora_rank": mla.q_rank,
            "kv_lora_rank": mla.kv_rank,
            "qk_nope_head_dim": mla.nope_width,
            "qk_rope_head_dim": mla.rope_width,
            "v_head_dim": mla.value_width,
        });
        let mut keys = sizes::write(model, own);
        keys.extend(map(self.0.write(moe, model)));
        if self.0.is_v3 {
            let depths = model.mtp.as_ref().map_or(0, |mtp| mtp.layers);
            keys.insert("num_nextn_predict_layers".into(), json!(depths));
            keys.insert("rope_interleave".into(), json!(true));
        }
        keys
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
