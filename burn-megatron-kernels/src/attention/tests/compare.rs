//! Tests that the comparison with the portable engine rejects wrong engines.

use burn::tensor::s;

use super::super::select::first_usable;
use super::*;

/// The fault of a [`Rounding`] engine.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// No fault.
    None,
    /// The mask is wrong: each query also attends to the next key.
    Mask,
    /// The window is ignored.
    Window,
    /// Consecutive heads belong to different groups.
    Groups,
    /// The last tile of 16 rows is not written.
    LastTile,
    /// The log-sum-exp is in base 2.
    Base,
    /// The output has one NaN.
    Nan,
    /// The gradient of the queries is not scaled.
    Scale,
    /// Gradients of scores lack the row sums.
    Delta,
    /// Keys get the gradient of only one head of their group.
    OneHead,
    /// Probabilities are rounded to bf16.
    Coarse,
}

/// Attention with Burn's operations in f32 that imitates an engine on tensor cores. Probabilities and gradients of
/// scores are rounded to the type of the inputs.
#[derive(Debug)]
struct Rounding(Fault);

impl Rounding {
    fn round(&self, x: Tensor<4>, problem: &AttentionProblem) -> Tensor<4> {
        let dtype = match self.0 {
            Fault::Coarse => DType::BF16,
            _ => problem.dtype,
        };
        x.cast(dtype).cast(DType::F32)
    }

    /// Returns queries, keys and values `[batch, heads, seq, width]`. Keys and values are repeated for each head of
    /// their group.
    fn inputs(&self, problem: &AttentionProblem, projections: Projections) -> [Tensor<4>; 3] {
        let Projections::Packed(qkv) = projections else {
            panic!("expected a joint projection")
        };
        let Heads {
            heads,
            groups,
            width,
        } = problem.heads;
        let slots = heads + 2 * groups;
        let qkv = qkv.cast(DType::F32);
        let qkv = qkv.reshape([problem.batch, problem.queries, slots, width]);
        let part = |first, count| qkv.clone().narrow(2, first, count).swap_dims(1, 2);
        let of_groups = |first| {
            let parts = (0..heads).map(|head| match self.0 {
                Fault::Groups => part(first + head % groups, 1),
                _ => part(first + head / (heads / groups), 1),
            });
            Tensor::cat(parts.collect(), 1)
        };
        [part(0, heads), of_groups(heads), of_groups(heads + groups)]
    }

    fn scores(&self, problem: &AttentionProblem, q: Tensor<4>, k: Tensor<4>) -> Tensor<4> {
        let after = if self.0 == Fault::Mask { 1 } else { 0 };
        let window = problem.options.window.filter(|_| self.0 != Fault::Window);
        let before = window.map_or(usize::MAX, |window| window.left);
        let seq = problem.queries;
        let sees = |i: usize, j: usize| j <= i + after && i.saturating_sub(j) <= before;
        let mask = (0..seq * seq).map(|at| {
            if sees(at / seq, at % seq) {
                0.0
            } else {
                f32::NEG_INFINITY
            }
        });
        let mask = TensorData::new(mask.collect::<Vec<_>>(), [1, 1, seq, seq]);
        q.matmul(k.transpose()) * problem.scale + Tensor::from_data(mask, &Device::flex())
    }
}

impl AttentionEngine for Rounding {
    fn name(&self) -> &'static str {
        "rounding"
    }

    fn supports(&self, _problem: &AttentionProblem) -> Result<(), String> {
        Ok(())
    }

    fn forward(&self, problem: &AttentionProblem, inputs: AttentionInputs) -> AttentionOutputs {
        let [q, k, v] = self.inputs(problem, inputs.projections);
        let scores = self.scores(problem, q, k);
        let most = scores.clone().max_dim(3);
        let weights = (scores - most.clone()).exp();
        let sums = weights.clone().sum_dim(3);
        let mut out = self.round(weights, problem).matmul(v) / sums.clone();
        let rows = problem.queries / 16 * 16;
        if self.0 == Fault::LastTile {
            out = out.clone().slice_fill(s![.., .., rows..], 0.0);
        }
        if self.0 == Fault::Nan {
            out = out.slice_fill(s![0, 0, 77, 3], f64::NAN);
        }
        let lse = (most + sums.log()).squeeze_dim::<3>(3);
        let lse = if self.0 == Fault::Base {
            lse / 2f64.ln()
        } else {
            lse
        };
        AttentionOutputs {
            out: out.swap_dims(1, 2).cast(problem.dtype),
            lse,
            largest: None,
        }
    }

    fn backward(&self, problem: &AttentionProblem, inputs: BackwardInputs) -> AttentionGradients {
        let ((out, lse), dout) = (inputs.result, inputs.dout);
        let [q, k, v] = self.inputs(problem, inputs.inputs.projections);
        let [out, dout] = [out, dout].map(|x| x.cast(DType::F32).swap_dims(1, 2));
        let scores = self.scores(problem, q.clone(), k.clone());
        let weights = (scores - lse.unsqueeze_dim::<4>(3)).exp();
        let delta = (dout.clone() * out).sum_dim(3);
        let delta = if self.0 == Fault::Delta {
            delta * 0.0
        } else {
            delta
        };
        let dscores = weights.clone() * (dout.clone().matmul(v.transpose()) - delta);
        let dscores = self.round(dscores, problem);
        let scale = problem.scale;
        let of_queries = if self.0 == Fault::Scale { 1.0 } else { scale };
        let dq = dscores.clone().matmul(k) * of_queries;
        let dk = dscores.transpose().matmul(q) * scale;
        let dv = self.round(weights, problem).transpose().matmul(dout);
        let Heads { heads, groups, .. } = problem.heads;
        let share = heads / groups;
        let of_groups = |x: Tensor<4>, share: usize| {
            let sums = (0..groups).map(|group| {
                x.clone()
                    .narrow(1, group * (heads / groups), share)
                    .sum_dim(1)
            });
            Tensor::cat(sums.collect(), 1)
        };
        let of_keys = if self.0 == Fault::OneHead { 1 } else { share };
        let gradients = Tensor::cat(vec![dq, of_groups(dk, of_keys), of_groups(dv, share)], 1);
        let gradients = gradients.swap_dims(1, 2).flatten::<3>(2, 3);
        AttentionGradients {
            projections: ProjectionGradients::Packed(gradients.cast(problem.dtype)),
            dsink: None,
        }
    }
}

fn compared(
    fault: Fault,
    dtype: DType,
    heads: Heads,
    window: Option<Window>,
) -> Result<(), String> {
    let engine = Rounding(fault);
    compare_with_portable(
        &engine,
        &Device::flex(),
        dtype,
        (heads, heads.width),
        window,
    )
    .map_err(|mismatch| mismatch.to_string())
}

const WINDOW: Option<Window> = Some(Window { left: 19, right: 0 });

#[test]
fn an_engine_that_rounds_once_is_accepted() {
    for dtype in [DType::BF16, DType::F16] {
        for heads in [
            heads(1, 1, 16),
            heads(12, 12, 64),
            heads(4, 2, 96),
            heads(6, 1, 128),
        ] {
            for window in [None, WINDOW] {
                let compared = compared(Fault::None, dtype, heads, window);
                assert_eq!(compared, Ok(()), "{dtype:?}, {heads:?}, {window:?}");
            }
        }
    }
    // In this case the values are narrower than the keys, and all projections are separate tensors.
    let device = Device::flex();
    let compared =
        compare_with_portable(&Portable, &device, DType::F16, (heads(4, 2, 24), 16), None);
    assert_eq!(compared, Ok(()));
}

#[test]
fn an_engine_that_is_wrong_is_refused() {
    let faults = [
        (Fault::Mask, "outputs"),
        (Fault::Window, "outputs"),
        (Fault::Groups, "outputs"),
        (Fault::LastTile, "outputs"),
        (Fault::Base, "log-sum-exps"),
        (Fault::Nan, "outputs"),
        (Fault::Scale, "gradients of queries"),
        (Fault::Delta, "gradients of queries"),
        (Fault::OneHead, "gradients of keys"),
    ];
    for dtype in [DType::BF16, DType::F16] {
        for (fault, what) in faults {
            let error = compared(fault, dtype, heads(4, 2, 64), WINDOW).unwrap_err();
            let named = error.starts_with(&format!("{what} differ from"));
            // A wrong mask also changes the log-sum-exp, which is compared first.
            let statistics = error.starts_with("log-sum-exps differ from");
            assert!(named || statistics, "{fault:?} in {dtype:?}: {error}");
        }
    }
    // The tolerances of f16 and bf16 differ.
    let coarse = |dtype| compared(Fault::Coarse, dtype, heads(1, 1, 64), None);
    assert_eq!(coarse(DType::BF16), Ok(()));
    let error = coarse(DType::F16).unwrap_err();
    assert!(
        error.contains("in F16: rounding explains at most 1.46e-3"),
        "{error}"
    );
}

#[test]
fn a_wrong_engine_is_skipped_with_its_numbers() {
    let candidates = |fault| {
        let engine: Arc<dyn AttentionEngine> = Arc::new(Rounding(fault));
        [
            (EngineKind::Mma, Ok(engine)),
            (EngineKind::Portable, Ok(Arc::new(Portable) as _)),
        ]
    };
    let check = |_, engine: &Arc<dyn AttentionEngine>| {
        let device = Device::flex();
        let compared =
            compare_with_portable(&**engine, &device, DType::BF16, (heads(2, 1, 32), 32), None);
        compared.map_err(|mismatch| mismatch.to_string())
    };
    let right = first_usable(candidates(Fault::None), check).unwrap();
    assert_eq!(
        (right.kind, right.engine.name()),
        (EngineKind::Mma, "rounding")
    );
    assert!(right.skipped.is_empty());
    let wrong = first_usable(candidates(Fault::Scale), check).unwrap();
    assert_eq!(
        (wrong.kind, wrong.engine.name()),
        (EngineKind::Portable, "portable")
    );
    let [reason] = &wrong.skipped[..] else {
        panic!("{:?}", wrong.skipped)
    };
    assert!(
        reason.starts_with("mma: gradients of queries differ from the results of portable by "),
        "{reason}"
    );
    // If one engine is requested, there is no fallback.
    let [requested, _] = candidates(Fault::Scale);
    assert_eq!(first_usable([requested], check).unwrap_err(), *reason);
}

#[test]
fn the_engine_of_a_cpu_is_portable() {
    let select = |kinds: &[EngineKind]| {
        select_engine(
            kinds,
            &Device::flex(),
            DType::BF16,
            (heads(4, 2, 64), 64),
            None,
        )
    };
    let selected = select(&EngineKind::ALL).unwrap();
    assert_eq!(selected.kind, EngineKind::Portable);
    assert_eq!(selected.skipped, ["mma: a CPU has no tensor cores"]);
    let error = select(&[EngineKind::Mma]).unwrap_err();
    insta::assert_snapshot!(error, @"mma: a CPU has no tensor cores");
}
