//! The sliding attention windows of layers, as keys of a `config.json`.

use serde_json::{Map, Value, json};

use super::map;
use crate::TransformerConfig;
use crate::hf::{ConfigKeys, HfConfigError};

/// The values of [`window`](TransformerConfig::window) and [`layer_windows`](TransformerConfig::layer_windows).
pub(super) type Windows = (Option<usize>, Vec<usize>);

/// The keys with which a family describes its windows.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum WindowKeys {
    /// The family has no windows.
    None,
    /// `sliding_window` applies to all layers.
    Whole,
    /// `sliding_window` applies to the layers that `layer_types` selects, or to the layers from index
    /// `max_window_layers`.
    ByLayer,
    /// `sliding_window` applies to all layers. Keys that select layers must not contradict this.
    Checked,
}

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

pub(super) fn read(
    kind: WindowKeys,
    keys: &mut ConfigKeys,
    layers: usize,
) -> Result<Windows, HfConfigError> {
    match kind {
        WindowKeys::None => Ok((None, vec![])),
        WindowKeys::Whole => Ok((keys.size("sliding_window")?, vec![])),
        WindowKeys::ByLayer => by_layer(keys, layers),
        WindowKeys::Checked => checked(keys, layers),
    }
}

/// Returns the window of Qwen models. Without `use_sliding_window`, `sliding_window` is ignored.
fn qwen_window(keys: &mut ConfigKeys) -> Result<Option<usize>, HfConfigError> {
    match keys.flag("use_sliding_window")?.unwrap_or(false) {
        true => keys.size("sliding_window"),
        false => Ok(keys.take("sliding_window").and(None)),
    }
}

/// Returns the window, which all layers have. The attention classes in `transformers` read neither `max_window_layers`
/// nor `layer_types`. Checks that these keys do not contradict the window.
fn checked(keys: &mut ConfigKeys, layers: usize) -> Result<Windows, HfConfigError> {
    let window = qwen_window(keys)?;
    keys.take("max_window_layers");
    let types = keys.take("layer_types");
    let kind = if window.is_some() { SLIDING } else { FULL };
    match types {
        Some(types) if types != json!(vec![kind; layers]) => {
            Err(keys.refused("layer_types", &types, format!("{layers} times {kind}")))
        }
        _ => Ok((window, vec![])),
    }
}

fn by_layer(keys: &mut ConfigKeys, layers: usize) -> Result<Windows, HfConfigError> {
    let window = qwen_window(keys)?;
    let first = keys.take("max_window_layers");
    let listed = layer_types(keys, layers, window.is_some())?;
    let Some(window) = window else {
        return Ok((None, vec![]));
    };
    let is_sliding = match (listed, &first) {
        (Some(listed), _) => listed,
        (None, Some(first)) if first.is_u64() => {
            let first = first.as_u64().unwrap_or(u64::MAX);
            (0..layers as u64).map(|layer| layer >= first).collect()
        }
        (None, first) => {
            let first = first.clone().unwrap_or_default();
            return Err(keys.refused("max_window_layers", &first, "a number of layers"));
        }
    };
    Ok(of_layers(&is_sliding, window))
}

/// Returns whether each layer has a window, if the key `layer_types` exists.
pub(super) fn layer_types(
    keys: &mut ConfigKeys,
    layers: usize,
    has_window: bool,
) -> Result<Option<Vec<bool>>, HfConfigError> {
    let Some(types) = keys.take("layer_types") else {
        return Ok(None);
    };
    let is_sliding = |kind: &Value| match kind.as_str() {
        Some(FULL) => Some(false),
        Some(SLIDING) if has_window => Some(true),
        _ => None,
    };
    let list = types.as_array().filter(|types| types.len() == layers);
    let list: Option<Vec<_>> = list.and_then(|list| list.iter().map(is_sliding).collect());
    let kinds = if has_window {
        format!("{FULL} or {SLIDING}")
    } else {
        FULL.into()
    };
    match list {
        Some(list) => Ok(Some(list)),
        None => Err(keys.refused("layer_types", &types, format!("{layers} times {kinds}"))),
    }
}

/// Returns the windows of the layers from `layer_types`. Without this key, all layers have the window except every
/// `step`-th layer.
pub(super) fn by_step(
    keys: &mut ConfigKeys,
    layers: usize,
    window: usize,
    step: usize,
) -> Result<Windows, HfConfigError> {
    let listed = layer_types(keys, layers, true)?;
    let by_step = || {
        (1..=layers)
            .map(|number| !number.is_multiple_of(step))
            .collect()
    };
    Ok(of_layers(&listed.unwrap_or_else(by_step), window))
}

/// Returns the windows of a model whose layers have either this window or no window.
fn of_layers(is_sliding: &[bool], window: usize) -> Windows {
    if !is_sliding.contains(&true) {
        return (None, vec![]);
    }
    if !is_sliding.contains(&false) {
        return (Some(window), vec![]);
    }
    let of_layer = |is_sliding: &bool| if *is_sliding { window } else { 0 };
    (None, is_sliding.iter().map(of_layer).collect())
}

/// Returns the window of the first layer that has one.
pub(super) fn size(model: &TransformerConfig) -> Option<usize> {
    model.windows().into_iter().flatten().next()
}

/// Returns the value of `layer_types` for a model.
pub(super) fn types(model: &TransformerConfig) -> Value {
    let kind = |window: Option<usize>| if window.is_some() { SLIDING } else { FULL };
    model.windows().into_iter().map(kind).collect()
}

pub(super) fn write(kind: WindowKeys, model: &TransformerConfig) -> Map<String, Value> {
    let window = size(model);
    match kind {
        WindowKeys::None => Map::new(),
        WindowKeys::Whole => map(json!({ "sliding_window": window })),
        WindowKeys::ByLayer | WindowKeys::Checked => {
            let mut keys = map(json!({
                "use_sliding_window": window.is_some(),
                "sliding_window": window,
                "max_window_layers": if window.is_some() { 0 } else { model.layers },
            }));
            if model.windows().iter().any(|own| *own != window) {
                keys.insert("layer_types".into(), types(model));
            }
            keys
        }
    }
}
