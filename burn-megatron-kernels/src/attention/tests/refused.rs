use burn::tensor::{DType, Device, Tensor};

use super::super::*;
use super::heads;
use crate::gradient::Place;
use crate::testing::devices;

pub(super) fn message(work: impl FnOnce() + std::panic::UnwindSafe) -> String {
    let error = std::panic::catch_unwind(work).unwrap_err();
    error.downcast_ref::<String>().cloned().unwrap()
}

#[test]
fn what_does_not_fit_is_refused_on_every_device() {
    for (device, _) in devices() {
        let refused =
            |q: [usize; 4], k: [usize; 4], sink: Option<usize>, scale, ends: Option<usize>| {
                let device = device.clone();
                message(move || {
                    let zeros = |shape| Tensor::<4>::zeros(shape, (&device, DType::F32));
                    let ranges = ends.map(|end| KeyRanges::of_documents(&[end], &device).unwrap());
                    let options = AttentionOptions {
                        scale,
                        ranges,
                        ..Default::default()
                    };
                    let sink = sink.map(|n| Tensor::<1>::zeros([n], (&device, DType::F32)));
                    flash_attention(zeros(q), zeros(k), zeros(k), sink, &options);
                })
            };
        let four = [1, 4, 2, 8];
        let agree = refused(four, [1, 4, 2, 9], None, None, None);
        assert!(agree.contains("do not agree"), "{agree}");
        let heads = refused([1, 4, 3, 8], four, None, None, None);
        assert!(heads.contains("3 heads for 2 groups"), "{heads}");
        let wide = refused([1, 4, 2, 257], [1, 4, 2, 257], None, None, None);
        assert!(
            wide.contains("heads of width 257: expected 1 to 256"),
            "{wide}"
        );
        let sink = refused(four, four, Some(3), None, None);
        assert!(sink.contains("a sink [3] for 2 heads"), "{sink}");
        let scale = refused(four, four, None, Some(f64::NAN), None);
        assert!(scale.contains("invalid scale = NaN"), "{scale}");
        let ranges = refused(four, four, None, None, Some(5));
        assert!(
            ranges.contains("ranges for 5 queries and 5 keys, but there are 4 queries"),
            "{ranges}"
        );
    }
    let flex = Device::flex();
    let falls = KeyRanges::of_documents(&[3, 2], &flex).unwrap_err();
    assert!(falls.to_string().contains("[.., 3, 2, ..]"), "{falls}");
    for (ranges, expected) in [
        (
            vec![0..2, 0..1],
            "[.., 0..2, 0..1, ..]: expected starts and ends",
        ),
        (
            vec![1..2, 0..3],
            "[.., 1..2, 0..3, ..]: expected starts and ends",
        ),
        (
            vec![0..1, 0..5],
            "0..5, ..] of 4 keys: expected ranges that end",
        ),
    ] {
        let error = KeyRanges::new(ranges, 4, &flex).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
    let packed = message(|| {
        let x = Tensor::<3>::zeros([1, 2, 31], &Device::flex());
        flash_attention_packed(x, heads(2, 1, 8), None, &AttentionOptions::default());
    });
    assert!(packed.contains("[1, 2, 31] does not hold"), "{packed}");
}

/// An engine that supports no problem.
#[derive(Debug)]
struct Picky;

impl AttentionEngine for Picky {
    fn name(&self) -> &'static str {
        "picky"
    }

    fn supports(&self, problem: &AttentionProblem) -> Result<(), String> {
        Err(format!(
            "heads of width {}: expected none",
            problem.heads.width
        ))
    }

    fn forward(&self, _: &AttentionProblem, _: AttentionInputs) -> AttentionOutputs {
        panic!("an engine that does not support a problem must not be called")
    }

    fn backward(&self, _: &AttentionProblem, _: BackwardInputs) -> AttentionGradients {
        panic!("an engine that does not support a problem must not be called")
    }
}

#[test]
fn a_buffer_that_does_not_hold_the_gradients_is_refused() {
    let refused = |dtype: DType, length: usize, offsets: &[usize]| {
        let places = offsets.iter().map(|offset| Place {
            offset: *offset,
            add: false,
        });
        let places = places.collect();
        message(move || {
            let device = Device::flex();
            let x = Tensor::<4>::zeros([1, 2, 1, 8], (&device, DType::F32));
            let options = AttentionOptions::default();
            let flat = Tensor::zeros([length], (&device, dtype));
            let sums = Some(FlatGradients { flat, places });
            let [q, k, v] = [(); 3].map(|()| x.clone());
            let result = attention_forward(&Portable, q, k, v, None, &options);
            let [q, k, v] = [(); 3].map(|()| x.clone());
            attention_backward(&Portable, q, k, v, None, result, x, &options, sums);
        })
    };
    let dtype = refused(DType::BF16, 32, &[0, 16]);
    assert!(
        dtype.contains("BF16 with queries in F32: expected F32"),
        "{dtype}"
    );
    let length = refused(DType::F32, 31, &[0, 16]);
    assert!(length.contains("expected at least 32"), "{length}");
    for offsets in [&[0][..], &[0, 18]] {
        let places = refused(DType::F32, 64, offsets);
        assert!(
            places.contains("each at a multiple of 4 elements"),
            "{places}"
        );
    }
}

#[test]
fn an_engine_that_refuses_is_an_error() {
    let message = message(|| {
        let x = Tensor::<4>::zeros([1, 2, 1, 8], &Device::flex());
        let options = AttentionOptions::default();
        flash_attention_with(Arc::new(Picky), x.clone(), x.clone(), x, None, &options);
    });
    assert!(
        message.contains("the engine \"picky\" does not support this problem: heads of width 8"),
        "{message}"
    );
}
