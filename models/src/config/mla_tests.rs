use burn::tensor::Device;
use burn_megatron::comm::ParallelContext;
use burn_megatron::mesh::{ContextExchange, ParallelConfig};
use burn_megatron::model::ModelConfig;
use burn_megatron::nn::ModelBuilder;

use super::*;
use burn_megatron::nn::moe::ScoreFunction;

use crate::{MoeConfig, MtpConfig};

/// Returns DeepSeek-V2-Lite, and DeepSeek-V3 without and with multi-token prediction.
fn published() -> [TransformerConfig; 3] {
    let mla = |q_rank| MlaConfig {
        q_rank,
        kv_rank: 512,
        nope_width: 128,
        rope_width: 64,
        value_width: 128,
        norm_epsilon: 1e-6,
    };
    let lite = TransformerConfig {
        vocabulary: 102_400,
        hidden: 2048,
        layers: 27,
        heads: 16,
        mlp_width: Some(10_944),
        mla: Some(mla(None)),
        moe: Some(MoeConfig {
            experts: 64,
            experts_per_token: 6,
            expert_width: Some(1408),
            shared_width: Some(2816),
            score: ScoreFunction::PreSoftmax,
            groups: None,
            bias_update_rate: None,
            factor: 1.0,
            ..MoeConfig::deepseek()
        }),
        ..TransformerConfig::deepseek()
    };
    let v3 = TransformerConfig {
        vocabulary: 129_280,
        hidden: 7168,
        layers: 61,
        heads: 128,
        mlp_width: Some(18_432),
        mla: Some(mla(Some(1536))),
        moe: Some(MoeConfig {
            experts: 256,
            experts_per_token: 8,
            expert_width: Some(2048),
            shared_width: Some(2048),
            first_dense: 3,
            ..MoeConfig::deepseek()
        }),
        ..TransformerConfig::deepseek()
    };
    let with_mtp = TransformerConfig {
        mtp: Some(MtpConfig::default()),
        ..v3.clone()
    };
    [lite, v3, with_mtp]
}

/// Megatron also counts the weights of the norms of latents: 16.3862 and 249.8121.
#[test]
fn sizes_are_the_published_ones() {
    let expected = [
        (15_706_484_224, 16.3861),
        (671_026_404_352, 249.8114),
        (682_636_472_320, 259.9921),
    ];
    for (config, (parameters, flops)) in published().into_iter().zip(expected) {
        let found = config.flops_per_token(4096) / 1e9;
        assert!((found - flops).abs() < 1e-4, "{found}");
        let builder = ModelBuilder::new(&ParallelContext::single(), &Device::flex());
        let model = config.init_with(builder.outline()).unwrap();
        let sizes = model.table.entries().iter();
        let found: usize = sizes
            .map(|entry| entry.shape.iter().product::<usize>())
            .sum();
        assert_eq!(found, parameters);
    }
}

fn yarn(mscale_all_dim: f64) -> Positions {
    Positions::Rotary {
        base: 1e4,
        scaling: RotaryScaling::Yarn {
            factor: 40.0,
            original: 4096,
            beta_fast: 32.0,
            beta_slow: 1.0,
            mscale: mscale_all_dim,
            mscale_all_dim,
            truncate: true,
            attention_factor: None,
        },
    }
}

/// The factors of DeepSeek-V3 and of DeepSeek-V2-Lite.
#[test]
fn yarn_scales_the_scores() {
    let mla = MlaConfig {
        q_rank: None,
        kv_rank: 512,
        nope_width: 128,
        rope_width: 64,
        value_width: 128,
        norm_epsilon: 1e-6,
    };
    let scale = |positions| format!("{:.10}", mla.scale(&positions));
    assert_eq!(scale(Positions::rotary(1e4)), "0.0721687836");
    assert_eq!(scale(yarn(1.0)), "0.1352337789");
    assert_eq!(scale(yarn(0.707)), "0.1147213868");
}

#[test]
fn what_latent_attention_has_not_is_refused() {
    let error = |change: &dyn Fn(&mut TransformerConfig)| {
        let mut model = TransformerConfig::deepseek();
        change(&mut model);
        let layout = ParallelConfig::new();
        model.check_layout(&layout).unwrap_err().to_string()
    };
    let with = |name: &str, expected: &str| {
        format!("model: invalid {name} with latent attention: expected {expected}")
    };
    assert_eq!(
        error(&|model| model.positions = Positions::Learned),
        with("positions", "rotary ones")
    );
    assert_eq!(
        error(&|model| model.groups = Some(2)),
        with(
            "groups",
            "none, because each head has its own keys and values"
        )
    );
    assert_eq!(
        error(&|model| model.window = Some(8)),
        with("windows", "none")
    );
    assert_eq!(
        error(&|model| model.bias = true),
        with("bias, qkv_bias and output_bias", "false")
    );
    let width =
        |change: &dyn Fn(&mut MlaConfig)| error(&|model| change(model.mla.as_mut().unwrap()));
    assert_eq!(
        width(&|mla| mla.rope_width = 5),
        with("mla.rope_width", "an even number")
    );
    insta::assert_snapshot!(
        width(&|mla| mla.kv_rank = 0),
        @"model: invalid mla.kv_rank = 0: expected at least 1"
    );
    let mut ring = ParallelConfig::new().with_context(2);
    ring.context_exchange = Some(ContextExchange::Ring);
    let error = TransformerConfig::deepseek()
        .check_layout(&ring)
        .unwrap_err();
    assert!(
        error.to_string().ends_with("expected all-gather"),
        "{error}"
    );
}
