//! The published configurations of DeepSeek and gpt-oss, from `published.json` in the fixtures.

use burn_megatron::nn::Activation;
use burn_megatron::nn::moe::{ExpertGroups, GroupScore, ScoreFunction};

use super::*;
use crate::MlaConfig;

fn published(name: &str) -> Value {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/fixtures/hf/published.json"
    );
    let mut all: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    all[name]["config"].take()
}

fn yarn(model: &TransformerConfig) -> RotaryScaling {
    match &model.positions {
        Positions::Rotary { scaling, .. } => scaling.clone(),
        Positions::Learned => RotaryScaling::None,
    }
}

#[test]
fn deepseek_is_understood() {
    let [lite, v2, v3, moonlight] = [
        "deepseek-v2-lite",
        "deepseek-v2",
        "deepseek-v3",
        "moonlight-16b-a3b",
    ]
    .map(|name| parse(&published(name)).unwrap().model);
    let mla = MlaConfig {
        q_rank: Some(1536),
        kv_rank: 512,
        nope_width: 128,
        rope_width: 64,
        value_width: 128,
        norm_epsilon: 1e-6,
    };
    assert_eq!((&v2.mla, &v3.mla), (&Some(mla.clone()), &Some(mla.clone())));
    let without = Some(MlaConfig {
        q_rank: None,
        ..mla
    });
    assert_eq!((&lite.mla, &moonlight.mla), (&without, &without));
    let moe = MoeConfig {
        experts: 256,
        experts_per_token: 8,
        expert_width: Some(2048),
        first_dense: 3,
        score: ScoreFunction::Sigmoid,
        factor: 2.5,
        groups: Some(ExpertGroups {
            groups: 8,
            chosen: 4,
            score: GroupScore::SumOf(2),
        }),
        bias_update_rate: Some(0.0),
        shared_width: Some(2048),
        ..MoeConfig::default()
    };
    assert_eq!(v3.moe, Some(moe));
    let moe = v2.moe.unwrap();
    let groups = ExpertGroups {
        groups: 8,
        chosen: 3,
        score: GroupScore::Max,
    };
    assert_eq!((moe.groups, moe.factor), (Some(groups), 16.0));
    assert_eq!(
        (moe.score, moe.shared_width),
        (ScoreFunction::PreSoftmax, Some(3072))
    );
    let moe = lite.moe.as_ref().unwrap();
    assert_eq!((moe.groups, moe.bias_update_rate), (None, None));
    let moe = moonlight.moe.as_ref().unwrap();
    assert_eq!((moe.groups, moe.factor), (None, 2.446));
    assert_eq!(moonlight.positions, Positions::rotary(5e4));
    let RotaryScaling::Yarn {
        factor,
        original,
        mscale,
        mscale_all_dim,
        ..
    } = yarn(&lite)
    else {
        panic!("{:?}", lite.positions)
    };
    assert_eq!(
        (factor, original, mscale, mscale_all_dim),
        (40.0, 4096, 0.707, 0.707)
    );
}

#[test]
fn gpt_oss_is_understood() {
    let model = parse(&published("gpt-oss-20b")).unwrap().model;
    assert!(model.sinks && model.bias);
    assert_eq!(model.activation, Activation::ClampedSwiGlu);
    assert_eq!((model.head_width, model.groups), (Some(64), Some(8)));
    assert_eq!(model.layer_windows[..3], [128, 0, 128]);
    let moe = model.moe.as_ref().unwrap();
    assert_eq!(
        (moe.experts, moe.experts_per_token, moe.router_bias),
        (32, 4, true)
    );
    let RotaryScaling::Yarn {
        factor, truncate, ..
    } = yarn(&model)
    else {
        panic!("{:?}", model.positions)
    };
    assert_eq!((factor, truncate), (32.0, false));
    // Without the list, every second layer also has the window, starting with the first layer.
    let mut without = published("gpt-oss-20b");
    without
        .as_object_mut()
        .unwrap()
        .remove("layer_types")
        .unwrap();
    assert_eq!(parse(&without).unwrap().model, model);
}

#[test]
fn what_the_layers_do_not_compute_is_refused() {
    for (name, key, value) in [
        ("deepseek-v3", "rope_interleave", json!(false)),
        ("deepseek-v3", "topk_method", json!("greedy")),
        ("deepseek-v3", "scoring_func", json!("softmax")),
        ("deepseek-v3", "num_key_value_heads", json!(8)),
        ("deepseek-v2", "topk_method", json!("noaux_tc")),
        ("deepseek-v2", "norm_topk_prob", json!(true)),
        ("deepseek-v2", "moe_layer_freq", json!(2)),
        ("deepseek-v2", "attention_bias", json!(true)),
        ("gpt-oss-20b", "swiglu_limit", json!(6.0)),
        ("gpt-oss-20b", "attention_bias", json!(false)),
        ("gpt-oss-20b", "layer_types", json!(["full_attention"])),
    ] {
        let error = parse(&with(published(name), key, value)).unwrap_err();
        let wanted = format!("invalid {key} = ");
        assert!(error.to_string().starts_with(&wanted), "{name}: {error}");
    }
}

/// Without `mscale`, the attention scores are still scaled, and cosines and sines have the default factor.
#[test]
fn mscale_all_dim_alone_scales_the_scores_of_latent_attention() {
    let both = parse(&published("deepseek-v2")).unwrap().model;
    let mut alone = published("deepseek-v2");
    let scaling = alone["rope_scaling"].as_object_mut().unwrap();
    scaling.remove("mscale").unwrap();
    let alone = parse(&alone).unwrap().model;
    let RotaryScaling::Yarn {
        mscale_all_dim,
        attention_factor,
        ..
    } = yarn(&alone)
    else {
        panic!("{:?}", alone.positions)
    };
    assert_eq!(attention_factor, Some(0.1 * 40f64.ln() + 1.0));
    assert_eq!(mscale_all_dim, 0.707);
    let scale = |model: &TransformerConfig| model.mla.as_ref().unwrap().scale(&model.positions);
    assert_eq!(scale(&alone), scale(&both));
}
