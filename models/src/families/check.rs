//! Checks that a family can describe a model. The configuration of the model is written as the keys of a `config.json`,
//! read again, and compared with the original.

use burn_megatron::model::{ConfigDifference, compare_settings};
use burn_megatron::nn::moe::RouterDType;
use serde_json::{Value, json};

use super::ModelFamily;
use crate::difference::plain;
use crate::hf::{ConfigKeys, HfConfigError, HfFamily};
use crate::{MoeConfig, MtpConfig, Positions, TransformerConfig};

pub(super) fn check(family: ModelFamily, model: &TransformerConfig) -> Result<(), HfConfigError> {
    let name = family.name();
    let refused = |needs: String| Err(HfConfigError::NoFamily(format!("{name} requires {needs}")));
    let conditions = family.family().conditions(model);
    if let Some((needs, _)) = conditions.into_iter().find(|(_, fits)| !fits) {
        return refused(needs.into());
    }
    let again = written_and_read(family, model)
        .map_err(|error| HfConfigError::NoFamily(format!("{name} cannot describe it: {error}")))?;
    let [again, own] = [&again, model].map(comparable);
    // A setting without a value may be missing on either side.
    let missing = compare_settings(&own, &again)
        .into_iter()
        .map(|it| ConfigDifference {
            own: it.other,
            other: it.own,
            ..it
        });
    let mut differences = compare_settings(&again, &own).into_iter().chain(missing);
    match differences.next() {
        None => Ok(()),
        Some(difference) => refused(needed(difference)),
    }
}

fn written_and_read(
    family: ModelFamily,
    model: &TransformerConfig,
) -> Result<TransformerConfig, HfConfigError> {
    let mut keys = family.write(model);
    keys.insert("model_type".into(), json!(family.name()));
    let (mut keys, family) = ConfigKeys::new::<ModelFamily>(keys)?;
    family.read(&mut keys)
}

/// Returns the model in a form that can be compared after it was written and read. Training settings that a
/// `config.json` does not contain are removed, and equivalent settings get the same form. The RoPE scaling is removed
/// too, because it may have other settings with the same effect after it is read.
fn comparable(model: &TransformerConfig) -> TransformerConfig {
    let usual_scale = (model.width_of_heads() as f64).powf(-0.5);
    let is_usual = |scale: f64| (scale / usual_scale - 1.0).abs() < 1e-12;
    let plain = plain(model);
    TransformerConfig {
        positions: match &model.positions {
            Positions::Rotary { base, .. } => Positions::rotary(*base),
            Positions::Learned => Positions::Learned,
        },
        attention_scale: model.attention_scale.filter(|scale| !is_usual(*scale)),
        moe: plain
            .moe
            .clone()
            .map(|moe| comparable_experts(moe, model.layers)),
        mtp: model.mtp.as_ref().map(|mtp| MtpConfig {
            layers: mtp.layers,
            ..MtpConfig::default()
        }),
        ..plain
    }
}

fn comparable_experts(moe: MoeConfig, layers: usize) -> MoeConfig {
    let blocks = (0..layers).filter(|number| moe.is_in(*number));
    let blocks: Vec<_> = blocks.take(2).collect();
    let dense = blocks.first().copied().unwrap_or(layers);
    let every = match blocks[..] {
        [first, second] => second - first,
        _ => 1,
    };
    MoeConfig {
        groups: moe.groups.filter(|groups| groups.chosen < groups.groups),
        bias_update_rate: moe.bias_update_rate.map(|_| 0.0),
        jitter: 0.0,
        router_dtype: RouterDType::F32,
        ..moe
    }
    .in_blocks(every, dense)
}

/// Returns the setting that the family requires, with its value. For nested settings, returns the innermost setting.
fn needed(difference: ConfigDifference) -> String {
    let ConfigDifference {
        mut setting,
        own: mut needed,
        other: mut found,
    } = difference;
    while let (Value::Object(all), Value::Object(others)) = (&needed, &found) {
        let mut differing = all
            .iter()
            .filter(|(key, value)| others.get(*key) != Some(value));
        let Some((key, value)) = differing.next() else {
            break;
        };
        setting = format!("{setting}.{key}");
        let other = others.get(key).cloned().unwrap_or_default();
        (needed, found) = (value.clone(), other);
    }
    match needed {
        Value::Null => format!("no {setting}"),
        needed => format!("{setting} = {needed}"),
    }
}
