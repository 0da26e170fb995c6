//! Tests the algorithms of cuBLASLt: they are timed only on request, saved, and used by later products.
#![cfg(feature = "cuda")]

use std::{env, fs};

use burn::tensor::{DType, Device, Tensor};
use burn_megatron::kernels::gemm::algorithms::{
    GemmAlgorithms, GemmTiming, gemm_library, time_algorithms, use_algorithms,
};
use burn_megatron::kernels::gemm::gelu::linear_gelu;
use burn_megatron::kernels::gemm::linear;
use burn_megatron_tests::gpu;

const TIMING: GemmTiming = GemmTiming {
    candidates: 8,
    rounds: 2,
    runs: 1,
};

fn matrix(rows: usize, columns: usize, device: &Device) -> Tensor<2> {
    let wave = Tensor::<1, burn::tensor::Int>::arange(0..(rows * columns) as i64, device);
    let wave = wave.float().mul_scalar(0.37).sin();
    wave.reshape([rows, columns]).cast(DType::BF16)
}

/// Returns the values of a product with a bias and of a product with GELU.
fn products(device: &Device) -> Vec<f32> {
    let (x, weight) = (matrix(24, 32, device), matrix(32, 40, device));
    let bias = matrix(1, 40, device).reshape([40]);
    let y = linear(x.clone(), weight.clone(), Some(bias));
    let gelu = linear_gelu(x, weight, None).activated;
    let values = (y + gelu).cast(DType::F32).into_data();
    values.try_into_vec().expect("f32")
}

/// Compares products of two algorithms. On a GPU, algorithms may add in a different order, which changes the last bit
/// of bf16.
fn assert_same(products: &[f32], expected: &[f32], emulated: bool) {
    let tolerance = if emulated { 0.0 } else { 2f32.powi(-6) };
    for (product, expected) in products.iter().zip(expected) {
        let difference = (product - expected).abs();
        let most = tolerance * expected.abs().max(1.0);
        assert!(difference <= most, "{product} differs from {expected}");
    }
    assert_eq!(products.len(), expected.len());
}

/// Runs `work`, and returns the algorithms of the products that it launches, in order. Returns `None` on a GPU, which
/// does not record them.
fn launched(work: impl FnOnce()) -> Option<Vec<u64>> {
    let file = env::var_os("BURN_MEGATRON_EMULATOR_COUNTS");
    let read = || {
        file.as_ref()
            .map(|file| fs::read_to_string(file).unwrap_or_default())
    };
    let before = read().map_or(0, |text| text.len());
    work();
    let lines = read()?.split_off(before);
    let numbers = lines.lines().filter_map(|line| {
        let line: serde_json::Value = serde_json::from_str(line).expect("a line of JSON");
        line["algorithm"].as_u64()
    });
    Some(numbers.collect())
}

/// A single test, since the selected algorithms belong to the process.
#[test]
fn algorithms_are_chosen_on_request_alone() {
    let device = gpu();
    let expected = products(&device);
    let usual = launched(|| drop(products(&device)));
    let emulated = usual.is_some();
    if let Some(usual) = &usual {
        assert_eq!(usual, &[0, 0], "that of the heuristic");
    }
    let work = || drop(products(&device));
    let mut timed = time_algorithms(&device, TIMING, work).expect("the device has cuBLASLt");
    assert_eq!(timed.library, gemm_library(&device).unwrap());
    let names: Vec<_> = timed.products.keys().map(String::as_str).collect();
    assert_eq!(names.len(), 2);
    for (name, end) in names.iter().zip([" bias", " gelu"]) {
        let is_own = name.starts_with("40x24x32 BF16*BF16=BF16 ") && name.ends_with(end);
        assert!(is_own, "{name}");
    }
    for chosen in timed.products.values() {
        let fastest = chosen.microseconds.iter().copied().fold(f64::MAX, f64::min);
        assert_eq!(chosen.microseconds[chosen.candidate], fastest);
        assert!(fastest > 0.0 && chosen.microseconds.len() <= TIMING.candidates);
    }
    let text = serde_json::to_string(&timed).expect("JSON");
    let read: GemmAlgorithms = serde_json::from_str(&text).expect("the same");
    assert_eq!(read, timed);
    // Timing has not selected an algorithm.
    assert_eq!(launched(|| drop(products(&device))), usual);
    if emulated {
        // The emulated GPU stores the number of an algorithm in the last word, and its workspace in the word before.
        for (chosen, (number, workspace)) in
            timed.products.values_mut().zip([(2, 128 << 10), (1, 0)])
        {
            assert_eq!(chosen.microseconds.len(), 3);
            chosen.algorithm[6..].copy_from_slice(&[workspace, number]);
        }
    }
    use_algorithms(&device, &timed).unwrap();
    let chosen = launched(|| assert_same(&products(&device), &expected, emulated));
    if let Some(chosen) = chosen {
        assert_eq!(chosen, [2, 1], "those that were kept");
    }
    let mut broken = timed.clone();
    for chosen in broken.products.values_mut() {
        chosen.algorithm = [7; 8];
    }
    use_algorithms(&device, &broken).unwrap();
    let fallen_back = launched(|| assert_same(&products(&device), &expected, emulated));
    assert_eq!(fallen_back, usual, "the library does not know them");
    let mut foreign = timed;
    foreign.library.device = "another device".into();
    let error = use_algorithms(&device, &foreign).unwrap_err();
    let prefix = "the algorithms were chosen on another device with cuBLASLt ";
    assert!(error.starts_with(prefix), "{error}");
}
