//! The settings of rotary position embedding, in the formats of `transformers` 4 (`rope_theta`, `rope_scaling`) and
//! `transformers` 5 (`rope_parameters`).

use serde_json::{Map, Value, json};

use crate::hf::{ConfigKeys, HfConfigError};
use crate::{Positions, RotaryScaling, TransformerConfig};

mod scaling;
mod yarn;

/// The rotary base of Gemma 3 in layers with a window.
const WINDOW_BASE: f64 = 10_000.0;

/// The rotary base of Gemma 3 in layers without a window.
const FULL_BASE: f64 = 1_000_000.0;

/// The context in which RoPE scaling parameters are read: settings of the model on which they depend.
#[derive(Clone, Copy)]
struct Around {
    /// `max_position_embeddings`.
    context: usize,
    /// The value of `original_max_position_embeddings` outside of the object with the RoPE parameters. `transformers`
    /// prefers it to the value inside the object.
    original: Option<usize>,
    /// Whether the object contains only the parameters of one kind of layer.
    is_of_layers: bool,
    /// Whether the model has multi-head latent attention, in which `mscale_all_dim` scales the attention scores.
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
    let (base, scaling) = scaling::read(inner, around)?;
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

/// Returns the position embedding of layers without a sliding window, and the RoPE base of layers with a sliding
/// window, as in Gemma 3.
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
        // The class in `transformers` would ignore this key.
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
    let (base, scaling) = scaling::read(full, around)?;
    let (local_base, local_scaling) = scaling::read(sliding, around)?;
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

/// Writes the settings in a format that both versions of `transformers` can read.
pub(super) fn write(model: &TransformerConfig, to: &mut Map<String, Value>) {
    if let Positions::Rotary { base, scaling } = &model.positions {
        to.insert("rope_theta".into(), json!(base));
        let scaling = scaling::write(scaling, model.context);
        to.insert("rope_scaling".into(), scaling);
    }
}
