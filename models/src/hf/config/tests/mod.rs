//! Tests of published configurations in both formats, and of rejected configurations.

mod keys;
mod latent;
mod published;
mod refused;

use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron::nn::{Activation, NormKind, QkNorm};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::{MoeConfig, Positions, RotaryScaling, TransformerConfig};

use published::{
    gemma2, gemma3, gpt2, llama, mistral, mixtral, olmoe, published, qwen2, qwen3, qwen3_moe,
};

/// The configuration of a [`ModelFamily`].
type HfConfig = super::HfConfig;

fn parse(value: &Value) -> Result<HfConfig, HfConfigError> {
    HfConfig::parse(value.to_string().as_bytes())
}

#[test]
fn published_models_are_understood() {
    let [
        gpt2,
        llama,
        mistral,
        qwen2,
        qwen3,
        mixtral,
        qwen3_moe,
        olmoe,
        gemma2,
        gemma3,
    ] = published().map(|value| parse(&value).unwrap());
    let model = &gpt2.model;
    assert_eq!(
        (model.norm, model.activation),
        (NormKind::Layer, Activation::GeluTanh)
    );
    assert_eq!((model.tied, model.bias, model.dropout), (true, true, 0.1));
    assert_eq!(model.mlp_width(), 3072);
    let model = &llama.model;
    assert_eq!(
        (llama.family, llama.dtype),
        (ModelFamily::Llama, Some(ElementType::Bf16))
    );
    assert_eq!(llama.tokens.eos, [128001, 128008, 128009]);
    assert_eq!(
        (model.groups, model.head_width, model.tied),
        (Some(8), Some(128), false)
    );
    let scaling = RotaryScaling::Llama3 {
        factor: 8.0,
        low: 1.0,
        high: 4.0,
        original: 8192,
    };
    let base = 500_000.0;
    assert_eq!(model.positions, Positions::Rotary { base, scaling });
    assert_eq!(mistral.model.window, Some(4096));
    let model = &qwen2.model;
    assert_eq!(
        (model.qkv_bias, model.bias, model.window),
        (Some(true), false, None)
    );
    assert_eq!(
        (qwen3.model.qk_norm, qwen3.model.head_width),
        (Some(QkNorm::Heads), Some(128))
    );
    assert_eq!(qwen3.model.positions, Positions::rotary(1e6));
    assert_eq!(mixtral.model.moe, Some(MoeConfig::default()));
    let moe = MoeConfig {
        experts: 128,
        experts_per_token: 8,
        expert_width: Some(768),
        ..MoeConfig::default()
    };
    assert_eq!(qwen3_moe.model.moe, Some(moe));
    let moe = MoeConfig {
        experts: 64,
        experts_per_token: 8,
        score: ScoreFunction::PreSoftmax,
        ..MoeConfig::default()
    };
    assert_eq!(olmoe.model.moe, Some(moe));
    assert_eq!(olmoe.model.qk_norm, Some(QkNorm::Whole));
    let model = &gemma2.model;
    assert_eq!(model.attention_scale, Some(1.0 / 12.0));
    assert_eq!(
        (model.attention_soft_cap, model.logit_soft_cap),
        (Some(50.0), Some(30.0))
    );
    assert_eq!(model.layer_windows, [[4096, 0]; 23].concat());
    let model = &gemma3.model;
    assert_eq!(
        (model.attention_soft_cap, model.attention_scale),
        (None, None)
    );
    assert_eq!(
        model.layer_windows[..7],
        [1024, 1024, 1024, 1024, 1024, 0, 1024]
    );
    let (base, scaling) = (1e6, RotaryScaling::Linear { factor: 8.0 });
    assert_eq!(model.positions, Positions::Rotary { base, scaling });
    assert_eq!(model.local_base, Some(1e4));
}

#[test]
fn blocks_with_experts_are_found() {
    for (step, dense, wanted) in [
        (1, json!([]), Some((1, 0))),
        (1, json!([0, 1]), Some((1, 2))),
        (2, json!([]), Some((2, 1))),
        (3, json!(null), Some((3, 2))),
        (1, json!([1, 3, 5]), Some((2, 0))),
        (1, json!([0, 1, 2, 3, 4, 5]), Some((1, 6))),
        (1, json!([1]), None),
        (1, json!([5]), None),
        (1, json!("all"), None),
    ] {
        let mut keys = qwen3_moe();
        keys["num_hidden_layers"] = json!(6);
        keys["decoder_sparse_step"] = json!(step);
        keys["mlp_only_layers"] = dense.clone();
        let found = parse(&keys).map(|config| config.model.moe.unwrap());
        match (found, wanted) {
            (Ok(moe), Some(wanted)) => assert_eq!((moe.every, moe.first_dense), wanted),
            (Err(error), None) => {
                assert!(error.to_string().contains("mlp_only_layers"), "{error}");
            }
            (found, _) => panic!("{step} {dense}: {found:?}"),
        }
    }
}

#[test]
fn the_spelling_of_transformers_5_says_the_same() {
    let old = parse(&llama()).unwrap();
    let mut new = llama();
    let keys = new.as_object_mut().unwrap();
    let mut rope = keys.remove("rope_scaling").unwrap();
    rope["rope_theta"] = keys.remove("rope_theta").unwrap();
    keys.insert("rope_parameters".into(), rope);
    let dtype = keys.remove("torch_dtype").unwrap();
    keys.insert("dtype".into(), dtype);
    keys.insert("head_dim".into(), json!(128));
    assert_eq!(parse(&new).unwrap(), old);
    let mut legacy = llama();
    let rope = legacy["rope_scaling"].as_object_mut().unwrap();
    let kind = rope.remove("rope_type").unwrap();
    rope.insert("type".into(), kind);
    assert_eq!(parse(&legacy).unwrap(), old);
}

#[test]
fn what_is_written_says_the_same() {
    let yarn = json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768 });
    let other = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "mscale": 0.7, "mscale_all_dim": 1.2, "beta_fast": 16, "beta_slow": 2 });
    let exact = json!({ "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
        "truncate": false });
    let linear = json!({ "rope_type": "linear", "factor": 8.0 });
    let dynamic = json!({ "rope_type": "dynamic", "factor": 8.0 });
    let own = json!({ "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768,
        "attention_factor": 1.1386 });
    // This is the scaling of a Phi-3 model with 64 pairs of features, in which the attention factor is computed from
    // both context lengths.
    let longrope = json!({ "type": "longrope", "original_max_position_embeddings": 4096,
        "short_factor": vec![1.05; 64], "long_factor": vec![1.1; 64] });
    let scaled = [yarn, other, exact, linear, dynamic, own, longrope]
        .map(|rope| with(qwen2(), "rope_scaling", rope));
    let mut windowed = with(qwen3(), "use_sliding_window", json!(true));
    (windowed["sliding_window"], windowed["max_window_layers"]) = (json!(64), json!(21));
    let gated = with(llama(), "hidden_act", json!("gelu_pytorch_tanh"));
    let mut biased = with(llama(), "mlp_bias", json!(true));
    biased["attention_bias"] = json!(true);
    let more = [
        with(llama(), "mlp_bias", json!(true)),
        with(llama(), "attention_bias", json!(true)),
        with(qwen3(), "attention_bias", json!(true)),
        with(qwen3_moe(), "attention_bias", json!(true)),
        with(olmoe(), "attention_bias", json!(true)),
        with(gemma3(), "attention_bias", json!(true)),
        with(mixtral(), "num_experts_per_tok", json!(1)),
        with(qwen3_moe(), "num_experts_per_tok", json!(1)),
        with(olmoe(), "num_experts_per_tok", json!(1)),
    ];
    for value in published()
        .into_iter()
        .chain(scaled)
        .chain([gated, biased, windowed])
        .chain(more)
    {
        let config = parse(&value).unwrap();
        let text = config.to_json().unwrap();
        assert_eq!(HfConfig::parse(text.as_bytes()).unwrap(), config, "{text}");
        // The family is selected by the settings of the model.
        assert_eq!(HfConfig::of(&config.model).unwrap().family, config.family);
    }
}

/// The class in `transformers` would replace null with YaRN, and its forward pass fails if the window is null.
#[test]
fn gpt_oss_without_scaling_or_windows_is_written_in_full() {
    let mut model = ModelFamily::GptOss.defaults();
    for windows in [vec![32, 0], vec![]] {
        let has_windows = !windows.is_empty();
        model.layer_windows = windows;
        let config: HfConfig = HfConfig::of(&model).unwrap();
        let text = config.to_json().unwrap();
        let keys: Value = serde_json::from_str(&text).unwrap();
        assert_eq!(keys["rope_scaling"], json!({ "rope_type": "default" }));
        let window = if has_windows { 32 } else { 128 };
        assert_eq!(keys["sliding_window"], json!(window));
        let again = parse(&keys).unwrap().model;
        assert_eq!(again.windows(), model.windows());
        assert_eq!(again.positions, model.positions);
    }
}

#[test]
fn keys_that_nothing_reads_are_ignored_by_name() {
    let mut value = llama();
    for (key, to) in [
        (
            "auto_map",
            json!({ "AutoConfig": "configuration_x.XConfig" }),
        ),
        ("is_llama_config", json!(true)),
        ("rope_interleaved", json!(false)),
        ("sliding_window", Value::Null),
        ("transformers.js_config", json!({ "dtype": "q4" })),
        ("unsloth_version", json!("2026.1.1")),
        ("a_note", json!("by hand")),
        ("an_empty_one", Value::Null),
    ] {
        value[key] = to;
    }
    value["rope_scaling"]["finetuned"] = json!(true);
    let config = parse(&value).unwrap();
    assert_eq!(config.ignored, ["rope_scaling.finetuned", "a_note"]);
    assert_eq!(config.model, parse(&llama()).unwrap().model);
}

fn with(mut value: Value, key: &str, to: Value) -> Value {
    match key.split_once('.') {
        Some((outer, inner)) => value[outer][inner] = to,
        None => value[key] = to,
    }
    value
}

proptest! {
    /// Any content is either parsed or rejected, and parsed content can be written.
    #[test]
    fn no_text_ends_the_program(
        which in 0usize..10, key in any::<prop::sample::Index>(),
        to in prop_oneof![
            Just(Value::Null), Just(json!({})), Just(json!([])), Just(json!("x")),
            any::<i32>().prop_map(|x| json!(x)), Just(json!(i64::MIN)), Just(json!(u64::MAX)),
            // Numbers that survive a JSON round trip exactly.
            any::<i32>().prop_map(|x| json!(f64::from(x) / 4.0)),
            (0u64..20).prop_map(|x| json!(x)), any::<bool>().prop_map(|x| json!(x)),
        ],
        at in any::<prop::sample::Index>(), byte in any::<u8>(),
    ) {
        let mut value = published()[which].clone();
        let keys: Vec<_> = value.as_object().unwrap().keys().cloned().collect();
        value[&keys[key.index(keys.len())]] = to;
        if let Ok(config) = parse(&value) {
            let text = config.to_json().unwrap();
            prop_assert_eq!(HfConfig::parse(text.as_bytes()).unwrap(), config);
        }
        let mut bytes = published()[which].to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        let _ = HfConfig::parse(&bytes);
    }
}
