//! Compares the effect of every key with its effect in `transformers`, also if the key is missing or null. `keys.py`
//! next to the fixtures writes `keys.json`. In this file, cases of a family with equal numbers have equal outputs in
//! `transformers`.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use serde_json::Map;

use super::*;
use crate::hf::config::keys::ASKED;

#[derive(Deserialize)]
struct Family {
    base: Map<String, Value>,
    cases: Vec<Case>,
}

/// The number of the output, the keys that are removed from the base, and the keys that are set.
#[derive(Deserialize)]
struct Case(Option<usize>, Vec<String>, Map<String, Value>);

fn families() -> BTreeMap<String, Family> {
    serde_json::from_str(include_str!("../../../../tests/fixtures/hf/keys.json")).unwrap()
}

fn keys_of(family: &str, base: &Map<String, Value>, case: &Case) -> Value {
    let mut keys = base.clone();
    keys.retain(|key, _| !case.1.contains(key));
    keys.extend(case.2.clone());
    keys.insert("model_type".into(), json!(family));
    Value::Object(keys)
}

/// Returns whether a case is refused on purpose, although `transformers` computes it.
fn is_refused_on_purpose(error: &str) -> bool {
    let reasons = [
        // Other activation functions, and exact GELU in gated MLPs.
        "invalid hidden_act = ",
        "invalid scale_attn",
        "invalid embd_pdrop",
        "invalid rope_interleave",
        "invalid attention_bias",
        "invalid mlp_bias",
        "attention_factor = 0.0",
        // Experts only in every n-th layer.
        "invalid mlp_only_layers",
        // The model code that was published with the weights reads these keys, but the class in `transformers` does
        // not.
        "invalid n_ctx",
        "invalid norm_topk_prob = true",
        "invalid topk_method = \"greedy\"",
        "requires num_experts_per_tok",
        "unknown num_experts",
        // Contradicting keys, and scalings that the class in `transformers` ignores.
        "invalid rope_theta",
        "next to rope_parameters",
        "full_attention and sliding_attention alone",
        "requires rope_scaling.rope_type",
        "rope_scaling.truncate",
        "unknown original_max_position_embeddings",
        "invalid num_local_experts = 8",
        "requires num_local_experts",
        // Sizes that the layers do not have.
        "chosen groups of 2 experts",
        "invalid head_width = 1",
    ];
    reasons.iter().any(|reason| error.contains(reason))
}

#[test]
fn every_key_means_what_it_means_in_transformers() {
    let mut faults = vec![];
    for (name, family) in families() {
        let mut known: BTreeMap<usize, (TransformerConfig, Value)> = BTreeMap::new();
        for case in &family.cases {
            let change = json!([case.1, case.2]);
            let parsed = parse(&keys_of(&name, &family.base, case));
            let mut fault = |what: String| faults.push(format!("{name}: {change}: {what}"));
            let (number, model) = match (case.0, parsed) {
                (None, Err(_)) => continue,
                // An earlier version of this crate wrote such a file.
                (None, Ok(config)) if name == "gpt_oss" && config.model.window.is_none() => {
                    continue;
                }
                (None, Ok(_)) => {
                    fault("transformers refuses it".into());
                    continue;
                }
                (Some(_), Err(error)) => {
                    if !is_refused_on_purpose(&error.to_string()) {
                        fault(error.to_string());
                    }
                    continue;
                }
                (Some(number), Ok(config)) => (number, config.model),
            };
            for (other, (known, of)) in &known {
                let is_same = number == *other;
                if is_same && *known != model {
                    fault(format!("differs from {of}\n{known:?}\n{model:?}"));
                } else if !is_same && *known == model {
                    fault(format!("equals {of}"));
                }
            }
            known.entry(number).or_insert((model, change));
        }
    }
    assert!(
        faults.is_empty(),
        "{} faults:\n{}",
        faults.len(),
        faults.join("\n")
    );
}

/// Keys that have only one accepted value, or no value that changes the model.
const WITHOUT_CASES: &str = "_sliding_window_pattern add_cross_attention architectures attention_bias aux_loss_alpha bos_token_id \
    cache_implementation dtype eos_token_id ep_size head_dim initial_context_length is_decoder is_encoder_decoder layer_types \
    mlp_bias model_type num_local_experts num_mtp_layers num_nextn_predict_layers pad_token_id pretraining_tp pruned_heads qk_head_dim \
    quantization_config rope_interleaved router_jitter_noise seq_aux tie_encoder_decoder torch_dtype \
    use_bidirectional_attention use_mrope";

/// Checks that every key has cases in `keys.py`.
#[test]
fn every_key_that_is_read_has_cases() {
    for (name, family) in families() {
        let mut given: BTreeSet<&String> = family.base.keys().collect();
        for Case(_, removed, set) in &family.cases {
            given.extend(removed.iter().chain(set.keys()));
        }
        ASKED.take();
        let base = Case(None, vec![], Map::new());
        parse(&keys_of(&name, &family.base, &base)).unwrap();
        let known: BTreeSet<&str> = WITHOUT_CASES.split_whitespace().collect();
        let has_cases = |key: &String| given.contains(key) || known.contains(&key[..]);
        let mut missing: Vec<_> = ASKED.take().into_iter().collect();
        // The keys of a nested object are covered by the cases of the object.
        missing.retain(|key| !key.contains('.') && !has_cases(key));
        assert_eq!(missing, [""; 0], "{name}");
    }
}
