//! Tests deferred readings on a device: reading the results of each step one step later changes nothing in a run.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use burn_megatron::data_parallel::Precision;
use burn_megatron::nn::fp8::Fp8Config;
use burn_megatron::nn::moe::ScoreFunction;
use burn_megatron_models::MoeConfig;
use burn_megatron_tests::overflows::{assert_overflows, overflowing, train};
use burn_megatron_tests::{Text, gpu};

#[test]
fn overflows_are_skipped_alike() {
    let (text, device) = (Text::new(), gpu());
    let text = text.open();
    let config = overflowing(Precision::F16, 2f64.powi(26));
    let delayed = Fp8Config {
        recipe: Some("delayed".parse().unwrap()),
        ..Fp8Config::default()
    };
    let plain = Fp8Config::default();
    let experts = MoeConfig {
        experts: 4,
        expert_width: Some(16),
        score: ScoreFunction::Sigmoid,
        bias_update_rate: Some(0.01),
        ..MoeConfig::default()
    };
    for (layout, fp8, moe) in [
        ("tp1-mb2", &plain, None),
        ("tp1-mb2", &delayed, None),
        ("tp1-ep2-dp2-mb2-z1", &plain, Some(&experts)),
    ] {
        let settings = (&config, fp8, moe);
        let [at_once, deferred] =
            [false, true].map(|defers| train(&device, layout, settings, &text, defers));
        assert_overflows(&at_once, layout);
        assert_eq!(at_once.ranks, deferred.ranks, "{layout}");
        assert!(
            at_once.files == deferred.files,
            "{layout}: the checkpoints differ"
        );
    }
}
