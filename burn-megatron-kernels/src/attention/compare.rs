//! Comparison of an attention engine with the portable engine on a small problem.

use burn::tensor::{DType, Device, Tensor, TensorData};

use super::engine::{AttentionEngine, Portable};
use super::options::{AttentionOptions, Heads, Window};
use super::problem::{
    AttentionInputs, AttentionProblem, BackwardInputs, ProjectionGradients, Projections,
};
use crate::KernelError;
use crate::philox::{Stream, uniform};

/// The number of sequences of the test problem, and the length of these sequences. The length exceeds the rows and
/// columns of a tile and is not a multiple of either.
const BATCH: usize = 2;
const LENGTH: usize = 150;

/// The maximum error of a row: the norm of its difference relative to the norm of the row, in units of the unit
/// roundoff of the element type.
///
/// An engine may round each probability and each score gradient once before a matrix multiplication, and both engines
/// round their results. These are three roundings of at most one unit each. The errors are independent, so the norm of
/// a row changes by at most 1.4 units. This value was computed in f64 for widths 16 to 128, 1 to 8 heads per group,
/// with and without a window.
const ROUNDINGS: f64 = 3.0;

/// The reason why a comparison with [`Portable`] rejected an attention engine.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum EngineMismatch {
    /// The results differ from the results of [`Portable`] by more than the tolerance.
    #[error(
        "{what} differ from the results of portable by {difference:.2e} in {dtype:?}: rounding explains at most \
         {tolerance:.2e}"
    )]
    Differs {
        /// The name of the output or gradient that differs.
        what: &'static str,
        /// The element type.
        dtype: DType,
        /// The largest relative error of any row: the norm of the difference divided by the norm of the row.
        difference: f64,
        /// The largest difference that rounding can explain.
        tolerance: f64,
    },
    /// The kernels failed to compile or to run.
    #[error("it cannot run: {0}")]
    Fails(String),
}

/// A small causal self-attention with random values.
pub(super) struct SmallProblem {
    pub problem: AttentionProblem,
    projections: Projections,
    dout: Tensor<4>,
}

impl SmallProblem {
    /// Creates a problem with at most two of the groups of `heads`, and with all query heads of these groups.
    ///
    /// The problem has a joint projection if values are as wide as keys. Otherwise it has separate projections.
    ///
    /// # Errors
    ///
    /// Returns an error if no engine supports heads of these sizes.
    pub fn new(
        device: &Device,
        dtype: DType,
        (heads, value_width): (Heads, usize),
        window: Option<Window>,
    ) -> Result<Self, KernelError> {
        let groups = heads.groups.min(2);
        let heads = Heads {
            heads: heads.heads / heads.groups.max(1) * groups,
            groups,
            width: heads.width,
        };
        let options = AttentionOptions {
            causal: true,
            window,
            ..AttentionOptions::default()
        };
        let device = device.clone().inner();
        // Scores have a standard deviation of about 1.3.
        let (problem, projections) = if value_width == heads.width {
            let qkv = random([BATCH, LENGTH, heads.features()], 2.0, 0, &device, dtype);
            let problem = AttentionProblem::packed(&qkv, heads, None, &options)?;
            (problem, Projections::Packed(qkv))
        } else {
            let part =
                |count, width, key| random([BATCH, LENGTH, count, width], 2.0, key, &device, dtype);
            let q = part(heads.heads, heads.width, 2);
            let (k, v) = (part(groups, heads.width, 3), part(groups, value_width, 4));
            let problem = AttentionProblem::separate([&q, &k, &v], None, &options)?;
            (problem, Projections::Separate { q, k, v })
        };
        let dout = random(problem.out_shape(), 1.0, 1, &device, dtype);
        Ok(Self {
            problem,
            projections,
            dout,
        })
    }
}

/// Returns random numbers, uniformly distributed between `-largest` and `largest`.
fn random<const D: usize>(
    shape: [usize; D],
    largest: f64,
    key: u64,
    device: &Device,
    dtype: DType,
) -> Tensor<D> {
    let len = shape.iter().product();
    let mut values = Vec::with_capacity(len);
    Stream::new(key, 0).words(0, len, |_, word| {
        values.push(((2.0 * uniform(word) - 1.0) * largest) as f32);
    });
    Tensor::from_data(
        TensorData::new(values, shape).convert_dtype(dtype),
        (device, dtype),
    )
}

/// Compares an engine with [`Portable`], forward and backward, on a small causal problem.
///
/// The problem has two sequences of 150 tokens in `dtype` on `device`. It uses at most two of the key-value groups of
/// `heads`, value heads with `value_width` features, and the given window.
///
/// # Errors
///
/// Returns [`EngineMismatch`] for the first output or gradient that differs by more than rounding to `dtype` can
/// explain.
///
/// # Panics
///
/// Panics if the engine does not [support](AttentionEngine::supports) this problem.
pub fn compare_with_portable(
    engine: &dyn AttentionEngine,
    device: &Device,
    dtype: DType,
    (heads, value_width): (Heads, usize),
    window: Option<Window>,
) -> Result<(), EngineMismatch> {
    let small = SmallProblem::new(device, dtype, (heads, value_width), window);
    let small = small.map_err(|error| EngineMismatch::Fails(error.to_string()))?;
    small.compare(engine)
}

impl SmallProblem {
    pub fn compare(&self, engine: &dyn AttentionEngine) -> Result<(), EngineMismatch> {
        let Self {
            problem,
            projections,
            dout,
        } = self;
        if let Err(reason) = engine.supports(problem) {
            panic!("{}: {reason}", engine.name());
        }
        let inputs = AttentionInputs {
            projections: projections.clone(),
            sink: None,
        };
        let forward = |engine: &dyn AttentionEngine| {
            let outputs = engine.forward(problem, inputs.clone());
            (outputs.out, outputs.lse)
        };
        let (expected, found) = (forward(&Portable), forward(engine));
        // Both engines get the same result of the forward pass, so that their gradients differ only by their own
        // rounding.
        let backward = |engine: &dyn AttentionEngine| {
            let inputs = BackwardInputs {
                inputs: inputs.clone(),
                result: expected.clone(),
                dout: dout.clone(),
                sums: None,
            };
            self.parts(engine.backward(problem, inputs).projections)
        };
        let [of_portable, of_engine] = [backward(&Portable), backward(engine)];
        let statistics = [doubles(expected.1)?, doubles(found.1)?];
        let outputs = [doubles(expected.0)?, doubles(found.0)?];
        self.check_statistics(&statistics)?;
        let (width, value_width) = (problem.heads.width, problem.value_width);
        self.check("outputs", &outputs, value_width)?;
        let names = [
            ("gradients of queries", width),
            ("gradients of keys", width),
            ("gradients of values", value_width),
        ];
        let pairs = of_portable.into_iter().zip(of_engine);
        for ((what, width), (expected, found)) in names.into_iter().zip(pairs) {
            self.check(what, &[doubles(expected)?, doubles(found)?], width)?;
        }
        Ok(())
    }

    /// Returns the gradients of queries, keys and values.
    fn parts(&self, gradients: ProjectionGradients) -> [Tensor<4>; 3] {
        let Heads {
            heads,
            groups,
            width,
        } = self.problem.heads;
        match gradients {
            ProjectionGradients::Separate { dq, dk, dv } => [dq, dk, dv],
            ProjectionGradients::Packed(joint) => {
                let joint = joint.reshape([BATCH, LENGTH, heads + 2 * groups, width]);
                let part = |first, count| joint.clone().narrow(2, first, count);
                [
                    part(0, heads),
                    part(heads, groups),
                    part(heads + groups, groups),
                ]
            }
            ProjectionGradients::Flat { .. } => unreachable!("no flat buffer was given"),
        }
    }

    /// Compares rows of `width` elements each.
    fn check(
        &self,
        what: &'static str,
        [expected, found]: &[Vec<f64>; 2],
        width: usize,
    ) -> Result<(), EngineMismatch> {
        let rows = expected.chunks(width).zip(found.chunks(width));
        let rows: Vec<_> = rows.collect();
        let squares = rows.iter().map(|(expected, _)| norm(expected).powi(2));
        let typical = (squares.sum::<f64>() / rows.len() as f64).sqrt();
        let apart = rows.iter().map(|(expected, found)| {
            let apart: Vec<_> = expected.iter().zip(*found).map(|(a, b)| a - b).collect();
            norm(&apart) / norm(expected).max(typical)
        });
        let difference = largest(apart);
        self.accept(what, difference, ROUNDINGS * roundoff(self.problem.dtype))
    }

    /// Compares log-sum-exps. A difference in a log-sum-exp changes each probability of the row by the same relative
    /// amount.
    fn check_statistics(&self, [expected, found]: &[Vec<f64>; 2]) -> Result<(), EngineMismatch> {
        let apart = expected.iter().zip(found).map(|(a, b)| (a - b).abs());
        let tolerance = roundoff(self.problem.dtype);
        self.accept("log-sum-exps", largest(apart), tolerance)
    }

    fn accept(
        &self,
        what: &'static str,
        difference: f64,
        tolerance: f64,
    ) -> Result<(), EngineMismatch> {
        if difference <= tolerance {
            return Ok(());
        }
        Err(EngineMismatch::Differs {
            what,
            dtype: self.problem.dtype,
            difference,
            tolerance,
        })
    }
}

/// Returns the largest relative error of rounding to `dtype`. For f32 and f64, returns the relative error of a sum that
/// is computed in a different order.
fn roundoff(dtype: DType) -> f64 {
    match dtype {
        DType::BF16 => 2f64.powi(-8),
        DType::F16 => 2f64.powi(-11),
        DType::F64 => LENGTH as f64 * 2f64.powi(-53),
        _ => LENGTH as f64 * 2f64.powi(-24),
    }
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

/// Returns the largest value, or infinity if a value is NaN.
fn largest(values: impl Iterator<Item = f64>) -> f64 {
    let finite = |x: f64| if x.is_nan() { f64::INFINITY } else { x };
    values.map(finite).fold(0.0, f64::max)
}

fn doubles<const D: usize>(tensor: Tensor<D>) -> Result<Vec<f64>, EngineMismatch> {
    let fails = |error: &dyn std::fmt::Display| EngineMismatch::Fails(error.to_string());
    let data = tensor.try_into_data().map_err(|error| fails(&error))?;
    let data = data.convert_dtype(DType::F64).try_into_vec();
    data.map_err(|error| fails(&format!("{error:?}")))
}
