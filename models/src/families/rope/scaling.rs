//! The scaling of rotary positions.

use serde_json::{Value, json};

use super::{Around, yarn};
use crate::RotaryScaling;
use crate::hf::{ConfigKeys, HfConfigError};

/// Reads the base and the scaling from `inner`. Returns no base and no scaling if `inner` is `None`.
pub(super) fn read(
    inner: Option<ConfigKeys>,
    around: Around,
) -> Result<(Option<f64>, RotaryScaling), HfConfigError> {
    let Some(mut inner) = inner else {
        return Ok((None, RotaryScaling::None));
    };
    inner.only("partial_rotary_factor", 1.0)?;
    for (key, fits) in [
        ("rope_theta", "a number above 1"),
        ("rope_type", "a string"),
    ] {
        inner.not_null(key, fits)?;
    }
    let base = inner.number("rope_theta")?;
    let kinds = [inner.text("rope_type")?, inner.text("type")?];
    let kind = match &kinds {
        [Some(a), Some(b)] if a != b => {
            return Err(inner.refused("type", &json!(b), format!("{a}, as rope_type")));
        }
        [a, b] => a.as_deref().or(b.as_deref()),
    };
    let scaling = match kind {
        None | Some("default") => RotaryScaling::None,
        Some("llama3") => llama3(&mut inner, around)?,
        Some("yarn") => yarn::read(&mut inner, around)?,
        Some("linear") => RotaryScaling::Linear {
            factor: inner.needed("factor", ConfigKeys::number)?,
        },
        Some("longrope") => long_rope(&mut inner, around)?,
        Some("dynamic") => RotaryScaling::Dynamic {
            factor: inner.needed("factor", ConfigKeys::number)?,
            original: around.context,
        },
        Some(other) => {
            let fits = "default, linear, dynamic, llama3, yarn or longrope";
            return Err(inner.refused("rope_type", &json!(other), fits));
        }
    };
    if around.is_latent && scaling != RotaryScaling::None {
        // In this crate, only YaRN has this factor of the attention scores. The classes of models with latent attention
        // read it for every kind of scaling.
        inner.only("mscale_all_dim", 0.0)?;
    }
    inner.finish()?;
    let scaling = match is_plain(&scaling) {
        true => RotaryScaling::None,
        false => scaling,
    };
    Ok((base, scaling))
}

/// Returns whether a scaling has no effect.
fn is_plain(scaling: &RotaryScaling) -> bool {
    match scaling {
        RotaryScaling::Linear { factor } | RotaryScaling::Llama3 { factor, .. } => *factor == 1.0,
        RotaryScaling::Yarn {
            factor,
            attention_factor,
            ..
        } => *factor == 1.0 && attention_factor.is_none(),
        RotaryScaling::LongRope {
            short_factor,
            long_factor,
            attention_factor,
            ..
        } => [short_factor, long_factor]
            .into_iter()
            .flatten()
            .chain([attention_factor])
            .all(|factor| *factor == 1.0),
        _ => false,
    }
}

/// Returns the context length of the original training. The default is the context of the model.
pub(super) fn original(keys: &mut ConfigKeys, around: Around) -> Result<usize, HfConfigError> {
    let key = "original_max_position_embeddings";
    keys.not_null(key, "a number of tokens")?;
    let own = keys.size(key)?;
    Ok(around.original.or(own).unwrap_or(around.context))
}

fn llama3(keys: &mut ConfigKeys, around: Around) -> Result<RotaryScaling, HfConfigError> {
    Ok(RotaryScaling::Llama3 {
        factor: keys.needed("factor", ConfigKeys::number)?,
        low: keys.needed("low_freq_factor", ConfigKeys::number)?,
        high: keys.needed("high_freq_factor", ConfigKeys::number)?,
        original: original(keys, around)?,
    })
}

/// Reads the settings of LongRoPE. By default, `attention_factor` is computed from `factor`, and `factor` is the ratio
/// of the context lengths.
fn long_rope(keys: &mut ConfigKeys, around: Around) -> Result<RotaryScaling, HfConfigError> {
    let short_factor = keys.needed("short_factor", ConfigKeys::numbers)?;
    let long_factor = keys.needed("long_factor", ConfigKeys::numbers)?;
    let original = original(keys, around)?;
    let factor = keys.number("factor")?;
    let factor = factor.unwrap_or(around.context as f64 / original as f64);
    let follows = match factor > 1.0 {
        true => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        false => 1.0,
    };
    let attention_factor = keys.positive("attention_factor")?.unwrap_or(follows);
    if !attention_factor.is_finite() {
        let fits = "at least 2, or a number for attention_factor";
        return Err(keys.refused("original_max_position_embeddings", &json!(original), fits));
    }
    Ok(RotaryScaling::LongRope {
        short_factor,
        long_factor,
        original,
        attention_factor,
    })
}

/// Returns the JSON of a scaling, for a model with a context length of `context` tokens. Returns `null` if there is no
/// scaling.
pub(super) fn write(scaling: &RotaryScaling, context: usize) -> Value {
    match scaling {
        RotaryScaling::None => Value::Null,
        RotaryScaling::Llama3 {
            factor,
            low,
            high,
            original,
        } => json!({
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }),
        RotaryScaling::Yarn { .. } => yarn::write(scaling),
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
        RotaryScaling::LongRope {
            short_factor,
            long_factor,
            original,
            attention_factor,
        } => json!({
            "rope_type": "longrope",
            "short_factor": short_factor,
            "long_factor": long_factor,
            "original_max_position_embeddings": original,
            "attention_factor": attention_factor,
            // `transformers` prints a warning if the factor is less than 1.
            "factor": (context as f64 / *original as f64).max(1.0),
        }),
        RotaryScaling::Dynamic { factor, .. } => {
            json!({ "rope_type": "dynamic", "factor": factor })
        }
    }
}
