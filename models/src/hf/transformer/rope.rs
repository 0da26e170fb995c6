//! Rotary positions, in the formats of `transformers` 4 (`rope_theta`, `rope_scaling`) and 5
//! (`rope_parameters`).

use serde_json::{Map, Value, json};

use crate::hf::{ConfigKeys, HfConfigError};
use crate::{Positions, RotaryScaling};

/// The default base of `transformers`.
const USUAL_BASE: f64 = 10_000.0;

/// That of Gemma 3 in layers without a window.
const FULL_BASE: f64 = 1_000_000.0;

pub(super) fn read(keys: &mut ConfigKeys, context: usize) -> Result<Positions, HfConfigError> {
    keys.only("partial_rotary_factor", 1.0)?;
    keys.only("rope_interleaved", false)?;
    let outer = keys.number("rope_theta")?;
    let new = keys.object("rope_parameters")?;
    let old = keys.object("rope_scaling")?;
    let inner = match (new, old) {
        (Some(_), Some(_)) => {
            let both = Value::from("beside rope_parameters");
            return Err(keys.refused("rope_scaling", &both, "only one of the two"));
        }
        (None, None) => {
            let base = outer.unwrap_or(USUAL_BASE);
            return Ok(Positions::rotary(base));
        }
        (Some(own), None) | (None, Some(own)) => own,
    };
    let (base, scaling) = parse(inner, context)?;
    let base = match (base, outer) {
        (Some(inner), Some(outer)) if inner != outer => {
            let fits = format!("{inner}, as in the scaling");
            return Err(keys.refused("rope_theta", &json!(outer), fits));
        }
        (inner, outer) => inner.or(outer).unwrap_or(USUAL_BASE),
    };
    Ok(Positions::Rotary { base, scaling })
}

/// The positions of layers without a window, and the base of those with one, as in Gemma 3.
pub(super) fn read_by_window(
    keys: &mut ConfigKeys,
    context: usize,
) -> Result<(Positions, f64), HfConfigError> {
    let outer = keys.number("rope_theta")?;
    let local = keys.number("rope_local_base_freq")?;
    let (mut full, mut sliding) = (keys.object("rope_scaling")?, None);
    if let Some(mut both) = keys.object("rope_parameters")? {
        if full.is_some() {
            let value = Value::from("beside rope_parameters");
            return Err(keys.refused("rope_scaling", &value, "only one of the two"));
        }
        full = both.object("full_attention")?;
        sliding = both.object("sliding_attention")?;
        both.finish()?;
    }
    let parsed = |inner: Option<ConfigKeys>| match inner {
        Some(inner) => parse(inner, context),
        None => Ok((None, RotaryScaling::None)),
    };
    let (base, scaling) = parsed(full)?;
    let (local_base, local_scaling) = parsed(sliding)?;
    if local_scaling != RotaryScaling::None {
        let value = json!("scaled");
        return Err(keys.refused("rope_parameters.sliding_attention", &value, "default"));
    }
    let positions = Positions::Rotary {
        base: base.or(outer).unwrap_or(FULL_BASE),
        scaling,
    };
    Ok((positions, local_base.or(local).unwrap_or(USUAL_BASE)))
}

/// The base and the scaling in an object.
fn parse(
    mut inner: ConfigKeys,
    context: usize,
) -> Result<(Option<f64>, RotaryScaling), HfConfigError> {
    inner.only("partial_rotary_factor", 1.0)?;
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
        Some("llama3") => llama3(&mut inner)?,
        Some("yarn") => yarn(&mut inner, context)?,
        Some("linear") => RotaryScaling::Linear {
            factor: inner.needed("factor", ConfigKeys::number)?,
        },
        Some(other) => {
            let fits = "default, linear, llama3 or yarn";
            return Err(inner.refused("rope_type", &json!(other), fits));
        }
    };
    inner.finish()?;
    Ok((base, scaling))
}

fn llama3(keys: &mut ConfigKeys) -> Result<RotaryScaling, HfConfigError> {
    Ok(RotaryScaling::Llama3 {
        factor: keys.needed("factor", ConfigKeys::number)?,
        low: keys.needed("low_freq_factor", ConfigKeys::number)?,
        high: keys.needed("high_freq_factor", ConfigKeys::number)?,
        original: keys.needed("original_max_position_embeddings", ConfigKeys::size)?,
    })
}

/// Defaults are those of `transformers`: 32 and 1 rotations, and an amplitude of `0.1 ln factor + 1` unless
/// both `mscale` and `mscale_all_dim` are given.
fn yarn(keys: &mut ConfigKeys, context: usize) -> Result<RotaryScaling, HfConfigError> {
    let truncate = keys.flag("truncate")?.unwrap_or(true);
    let original = keys.needed("original_max_position_embeddings", ConfigKeys::size)?;
    let factor = keys
        .number("factor")?
        .unwrap_or(context as f64 / original as f64);
    // 0 counts as not given.
    let mut given = |key| Ok(keys.number(key)?.filter(|x| *x != 0.0));
    let (fast, slow) = (given("beta_fast")?, given("beta_slow")?);
    let (mscale, mscale_all_dim) = match (given("mscale")?, given("mscale_all_dim")?) {
        (Some(a), Some(b)) => (a, b),
        (None, Some(b)) => {
            // It scales the scores of latent attention alone, and otherwise nothing.
            return Err(keys.refused("mscale_all_dim", &json!(b), "mscale beside it"));
        }
        _ => (1.0, 0.0),
    };
    let at = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    let amplitude = at(mscale) / at(mscale_all_dim);
    if let Some(asked) = keys.number("attention_factor")?
        && (asked - amplitude).abs() > 1e-6
    {
        let fits = format!("{amplitude}, which follows from the factor");
        return Err(keys.refused("attention_factor", &json!(asked), fits));
    }
    Ok(RotaryScaling::Yarn {
        factor,
        original,
        beta_fast: fast.unwrap_or(32.0),
        beta_slow: slow.unwrap_or(1.0),
        mscale,
        mscale_all_dim,
        truncate,
    })
}

/// Writes the format that both versions read.
pub(super) fn write(base: f64, scaling: RotaryScaling, to: &mut Map<String, Value>) {
    to.insert("rope_theta".into(), json!(base));
    let scaling = match scaling {
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
        RotaryScaling::Yarn {
            factor,
            original,
            beta_fast,
            beta_slow,
            mscale,
            mscale_all_dim,
            truncate,
        } => {
            let mut yarn = json!({
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "original_max_position_embeddings": original,
            });
            if (mscale, mscale_all_dim) != (1.0, 0.0) {
                let at = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
                if mscale != 0.0 && mscale_all_dim != 0.0 {
                    yarn["mscale"] = json!(mscale);
                    yarn["mscale_all_dim"] = json!(mscale_all_dim);
                } else {
                    yarn["attention_factor"] = json!(at(mscale) / at(mscale_all_dim))
                }
            }
            if !truncate {
                yarn["truncate"] = json!(false);
            }
            yarn
        }
        RotaryScaling::Linear { factor } => json!({ "rope_type": "linear", "factor": factor }),
    };
    to.insert("rope_scaling".into(), scaling);
}
