//! Rotary positions, in the formats of `transformers` 4 (`rope_theta`, `rope_scaling`) and 5
//! (`rope_parameters`).

use serde_json::{Map, Value, json};

use crate::hf::{ConfigKeys, HfConfigError};
use crate::{Positions, RotaryScaling, TransformerConfig};

/// The base of Gemma 3 in layers with a window.
const WINDOW_BASE: f64 = 10_000.0;

/// The base of Gemma 3 in layers without a window.
const FULL_BASE: f64 = 1_000_000.0;

/// The model around an object of scaling parameters.
#[derive(Clone, Copy)]
struct Around {
    /// `max_position_embeddings`.
    context: usize,
    /// The key outside the object. `transformers` prefers it to the key inside the object.
    original: Option<usize>,
    /// Whether the object belongs to layers of one kind.
    is_of_layers: bool,
    /// Whether attention is latent, so that `mscale_all_dim` scales the scores.
    is_latent: bool,
}

pub(super) fn read(
    keys: &mut ConfigKeys,
    context: usize,
    is_latent: bool,
) -> Result<Positions, HfConfigError> {
    keys.only("partial_rotary_factor", 1.0)?;
    keys.only("rope_interleaved", false)?;
    let around = Around {
        context,
        original: keys.size("original_max_position_embeddings")?,
        is_of_layers: false,
        is_latent,
    };
    let outer = keys.number("rope_theta")?;
    let new = keys.object("rope_parameters")?;
    let old = keys.object("rope_scaling")?.filter(|old| !old.is_empty());
    let inner = match (new, old) {
        (Some(_), Some(_)) => return Err(both_objects(keys)),
        (new, old) => new.or(old),
    };
    let (base, scaling) = match inner {
        Some(inner) => parse(inner, around)?,
        None => (None, RotaryScaling::None),
    };
    let base = match (base, outer) {
        (Some(inner), Some(outer)) if inner != outer => {
            let fits = format!("{inner}, as in the scaling");
            return Err(keys.refused("rope_theta", &json!(outer), fits));
        }
        (inner, outer) => inner.or(outer),
    };
    let base = base.ok_or_else(|| keys.missing("rope_theta"))?;
    Ok(Positions::Rotary { base, scaling })
}

fn both_objects(keys: &ConfigKeys) -> HfConfigError {
    let both = Value::from("next to rope_parameters");
    keys.refused("rope_scaling", &both, "only one of the two")
}

/// The positions of layers without a window, and the base of those with one, as in Gemma 3.
pub(super) fn read_by_window(
    keys: &mut ConfigKeys,
    context: usize,
) -> Result<(Positions, f64), HfConfigError> {
    for key in ["rope_theta", "rope_local_base_freq"] {
        keys.not_null(key, "a number above 1")?;
    }
    let outer = keys.number("rope_theta")?;
    let local = keys.number("rope_local_base_freq")?;
    let old = keys.object("rope_scaling")?.filter(|old| !old.is_empty());
    if let Some(old) = &old
        && !old.has("rope_type")
        && old.has("type")
    {
        // The class of transformers would overlook it.
        return Err(old.missing("rope_type"));
    }
    let (mut full, mut sliding) = (old, None);
    if let Some(mut both) = keys.object("rope_parameters")? {
        if full.is_some() {
            return Err(both_objects(keys));
        }
        full = both.object("full_attention")?;
        sliding = both.object("sliding_attention")?;
        if !both.is_empty() {
            let fits = "objects full_attention and sliding_attention alone";
            return Err(keys.refused("rope_parameters", &both.rest(), fits));
        }
    }
    let around = Around {
        context,
        original: None,
        is_of_layers: true,
        is_latent: false,
    };
    let parsed = |inner: Option<ConfigKeys>| match inner {
        Some(inner) => parse(inner, around),
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
    Ok((positions, local_base.or(local).unwrap_or(WINDOW_BASE)))
}

/// The base and the scaling in an object.
fn parse(
    mut inner: ConfigKeys,
    around: Around,
) -> Result<(Option<f64>, RotaryScaling), HfConfigError> {
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
        Some("yarn") => yarn(&mut inner, around)?,
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
        // Only YaRN has this factor of the scores here. The classes of latent attention read it for every scaling.
        inner.only("mscale_all_dim", 0.0)?;
    }
    inner.finish()?;
    let is_plain = match &scaling {
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
    };
    let scaling = if is_plain {
        RotaryScaling::None
    } else {
        scaling
    };
    Ok((base, scaling))
}

/// Returns the context of the original training. The default is the context of the model.
fn original(keys: &mut ConfigKeys, around: Around) -> Result<usize, HfConfigError> {
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

/// Reads LongRoPE. By default, `attention_factor` follows from `factor`, and `factor` is the ratio of the contexts.
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

/// Reads YaRN with the defaults of `transformers`: 32 and 1 rotations, and an amplitude of `0.1 ln factor + 1` unless
/// both `mscale` and `mscale_all_dim` are given.
fn yarn(keys: &mut ConfigKeys, around: Around) -> Result<RotaryScaling, HfConfigError> {
    // Null means false.
    let truncate = match keys.has("truncate") {
        true => keys.flag("truncate")?.unwrap_or(false),
        false => true,
    };
    if around.is_of_layers && !truncate {
        // The class of transformers looks for the key outside of the object.
        return Err(keys.refused("truncate", &json!(truncate), "true"));
    }
    let original = original(keys, around)?;
    // Null means the ratio of the contexts.
    let factor = match keys.has("factor") {
        true => keys.number("factor")?,
        false => return Err(keys.missing("factor")),
    };
    let factor = factor.unwrap_or(around.context as f64 / original as f64);
    // 0 counts as not given.
    let mut given = |key| Ok(keys.number(key)?.filter(|x| *x != 0.0));
    let (fast, slow) = (given("beta_fast")?, given("beta_slow")?);
    let (mscale, all_dim) = (given("mscale")?, given("mscale_all_dim")?);
    let at = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
    let (mscale, mscale_all_dim, follows) = match (mscale, all_dim) {
        (Some(a), Some(b)) => (a, b, at(a) / at(b)),
        _ => (1.0, 0.0, at(1.0)),
    };
    let mut scaling = RotaryScaling::Yarn {
        factor,
        original,
        beta_fast: fast.unwrap_or(32.0),
        beta_slow: slow.unwrap_or(1.0),
        mscale,
        mscale_all_dim,
        truncate,
        attention_factor: None,
    };
    let asked = keys.positive("attention_factor")?.unwrap_or(follows);
    // The factor of the scores of latent attention depends only on mscale_all_dim.
    let of_scores = all_dim.filter(|_| around.is_latent).unwrap_or(0.0);
    let is_same = (asked - follows).abs() < 1e-9;
    if let RotaryScaling::Yarn {
        mscale,
        mscale_all_dim,
        attention_factor,
        ..
    } = &mut scaling
        && (!is_same || around.is_latent && of_scores != *mscale_all_dim)
    {
        (*mscale, *mscale_all_dim) = (1.0, of_scores);
        *attention_factor = Some(asked);
    }
    Ok(scaling)
}

/// Writes the format that both versions read.
pub(super) fn write(model: &TransformerConfig, to: &mut Map<String, Value>) {
    let Positions::Rotary { base, scaling } = model.positions.clone() else {
        return;
    };
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
            attention_factor,
        } => {
            let mut yarn = json!({
                "rope_type": "yarn",
                "factor": factor,
                "beta_fast": beta_fast,
                "beta_slow": beta_slow,
                "original_max_position_embeddings": original,
            });
            let at = |scale: f64| 0.1 * scale * factor.ln() + 1.0;
            let follows = at(mscale) / at(mscale_all_dim);
            let asked = attention_factor.unwrap_or(follows);
            let is_usual = (mscale, mscale_all_dim) == (1.0, 0.0);
            if mscale != 0.0 && mscale_all_dim != 0.0 {
                yarn["mscale"] = json!(mscale);
                yarn["mscale_all_dim"] = json!(mscale_all_dim);
            } else if !is_usual {
                yarn["attention_factor"] = json!(asked);
            }
            if attention_factor.is_some() {
                yarn["attention_factor"] = json!(asked);
            }
            if !truncate {
                yarn["truncate"] = json!(false);
            }
            yarn
        }
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
            // `transformers` warns without a factor of at least 1.
            "factor": (model.context as f64 / original as f64).max(1.0),
        }),
        RotaryScaling::Dynamic { factor, .. } => {
            json!({ "rope_type": "dynamic", "factor": factor })
        }
    };
    to.insert("rope_scaling".into(), scaling);
}
