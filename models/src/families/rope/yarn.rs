//! YaRN scaling (Peng et al. 2023, arXiv:2309.00071).

use serde_json::{Value, json};

use super::Around;
use super::scaling::original;
use crate::RotaryScaling;
use crate::hf::{ConfigKeys, HfConfigError};

/// Returns the scale factor of queries and keys in YaRN.
fn amplitude(scale: f64, factor: f64) -> f64 {
    0.1 * scale * factor.ln() + 1.0
}

/// Reads the settings of YaRN. As in `transformers`, `beta_fast` and `beta_slow` are 32 and 1 by default. The attention
/// factor is `0.1 ln factor + 1`, unless both `mscale` and `mscale_all_dim` are given.
pub(super) fn read(keys: &mut ConfigKeys, around: Around) -> Result<RotaryScaling, HfConfigError> {
    // For `truncate`, null means false.
    let truncate = match keys.has("truncate") {
        true => keys.flag("truncate")?.unwrap_or(false),
        false => true,
    };
    if around.is_of_layers && !truncate {
        // The class in `transformers` reads this key outside of the object.
        return Err(keys.refused("truncate", &json!(truncate), "true"));
    }
    let original = original(keys, around)?;
    // For `factor`, null means the ratio of the context lengths.
    let factor = match keys.has("factor") {
        true => keys.number("factor")?,
        false => return Err(keys.missing("factor")),
    };
    let factor = factor.unwrap_or(around.context as f64 / original as f64);
    // As in `transformers`, 0 has the same meaning as a missing key.
    let mut given = |key| Ok(keys.number(key)?.filter(|x| *x != 0.0));
    let (fast, slow) = (given("beta_fast")?, given("beta_slow")?);
    let (mscale, all_dim) = (given("mscale")?, given("mscale_all_dim")?);
    let at = |scale| amplitude(scale, factor);
    let (mscale, mscale_all_dim, follows) = match (mscale, all_dim) {
        (Some(a), Some(b)) => (a, b, at(a) / at(b)),
        _ => (1.0, 0.0, at(1.0)),
    };
    let asked = keys.positive("attention_factor")?.unwrap_or(follows);
    // The scale factor of the attention scores in latent attention depends only on `mscale_all_dim`.
    let of_scores = all_dim.filter(|_| around.is_latent).unwrap_or(0.0);
    let is_same = (asked - follows).abs() < 1e-9;
    let is_usual = is_same && !(around.is_latent && of_scores != mscale_all_dim);
    let (mscale, mscale_all_dim, attention_factor) = match is_usual {
        true => (mscale, mscale_all_dim, None),
        false => (1.0, of_scores, Some(asked)),
    };
    Ok(RotaryScaling::Yarn {
        factor,
        original,
        beta_fast: fast.unwrap_or(32.0),
        beta_slow: slow.unwrap_or(1.0),
        mscale,
        mscale_all_dim,
        truncate,
        attention_factor,
    })
}

/// Returns the JSON of YaRN scaling, or `null` for another kind of scaling.
pub(super) fn write(scaling: &RotaryScaling) -> Value {
    let RotaryScaling::Yarn {
        factor,
        original,
        beta_fast,
        beta_slow,
        mscale,
        mscale_all_dim,
        truncate,
        attention_factor,
    } = *scaling
    else {
        return Value::Null;
    };
    let mut yarn = json!({
        "rope_type": "yarn",
        "factor": factor,
        "beta_fast": beta_fast,
        "beta_slow": beta_slow,
        "original_max_position_embeddings": original,
    });
    let has_both = mscale != 0.0 && mscale_all_dim != 0.0;
    if has_both {
        yarn["mscale"] = json!(mscale);
        yarn["mscale_all_dim"] = json!(mscale_all_dim);
    }
    let is_usual = has_both || (mscale, mscale_all_dim) == (1.0, 0.0);
    if attention_factor.is_some() || !is_usual {
        let follows = amplitude(mscale, factor) / amplitude(mscale_all_dim, factor);
        yarn["attention_factor"] = json!(attention_factor.unwrap_or(follows));
    }
    if !truncate {
        yarn["truncate"] = json!(false);
    }
    yarn
}
