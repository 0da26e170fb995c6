use burn::tensor::{DType, Device, Tensor};

use super::super::*;
use super::heads;
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
                    let documents = ends.map(|end| Documents::new(vec![end], &device).unwrap());
                    let options = AttentionOptions {
                        scale,
                        documents,
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
        let documents = refused(four, four, None, None, Some(5));
        assert!(
            documents.contains("documents of 5 positions for 4 queries"),
            "{documents}"
        );
    }
    let falls = Documents::new(vec![3, 2], &Device::flex())
        .unwrap_err()
        .to_string();
    assert!(falls.contains("[.., 3, 2, ..]"), "{falls}");
    let packed = message(|| {
        let x = Tensor::<3>::zeros([1, 2, 31], &Device::flex());
        flash_attention_packed(x, heads(2, 1, 8), None, &AttentionOptions::default());
    });
    assert!(packed.contains("[1, 2, 31] does not hold"), "{packed}");
}

/// Refuses everything.
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

    fn forward(
        &self,
        _: &AttentionProblem,
        _: Projections,
        _: Option<Tensor<1>>,
    ) -> (Tensor<4>, Tensor<3>) {
        panic!("an engine that does not support a problem must not be called")
    }

    fn backward(
        &self,
        _: &AttentionProblem,
        _: Projections,
        _: Option<Tensor<1>>,
        _: (Tensor<4>, Tensor<3>),
        _: Tensor<4>,
    ) -> (Projections, Option<Tensor<1>>) {
        panic!("an engine that does not support a problem must not be called")
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
