//! On a device, a run that reads each step one step later equals one that reads at once.
#![cfg(any(feature = "cuda", feature = "wgpu"))]

use burn_megatron::data_parallel::Precision;
use burn_megatron::nn::fp8::Fp8Config;
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
    for (layout, fp8) in [
        ("tp1-mb2", &plain),
        ("dp2-mb2-z1", &plain),
        ("tp1-mb2", &delayed),
    ] {
        let [at_once, deferred] =
            [false, true].map(|defers| train(&device, layout, (&config, fp8), &text, defers));
        assert_overflows(&at_once, layout);
        assert_eq!(at_once.ranks, deferred.ranks, "{layout}");
        assert!(
            at_once.files == deferred.files,
            "{layout}: the checkpoints differ"
        );
    }
}
