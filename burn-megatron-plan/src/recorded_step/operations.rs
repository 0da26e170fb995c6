//! Rules for the memory of Burn's differentiable operations: the tensors that each operation keeps for its backward,
//! and the memory that its backward allocates.
//!
//! The rules follow `burn-autodiff` 0.22.1 without gradient checkpointing. The tests in `tests/tests/plan_memory/`
//! compare the planned bytes with the bytes on the heap. Every operation has a rule. An operation that is not listed
//! keeps its inputs, and in some groups also its outputs.

use burn_ir::{
    ActivationOperationIr as Activation, BaseOperationIr, FloatOperationIr, ModuleOperationIr,
    NumericOperationIr as Numeric, OperationIr, TensorIr,
};
use burn_megatron_kernels::record::in_place;

use super::storage::bytes_of;

/// The backward of an operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rule {
    /// The inputs and outputs that are kept.
    pub saved: Vec<TensorIr>,
    /// The sizes in bytes of other tensors that are kept: intermediate results of an operation that autodiff runs as
    /// several operations.
    pub inner: Vec<u64>,
    /// The tracked inputs whose gradients are new tensors. The gradients of the other inputs share the memory of the
    /// output's gradient.
    pub made: Vec<TensorIr>,
    /// The inputs that are tracked by autodiff, which get a gradient.
    pub inputs: Vec<TensorIr>,
}

impl Rule {
    fn with_inner(self, inner: impl IntoIterator<Item = u64>) -> Self {
        let inner = inner.into_iter().collect();
        Self { inner, ..self }
    }
}

/// Bytes of an element of an index tensor.
const INDEX: u64 = 8;

/// Returns the size in bytes of a tensor with the same number of elements and `size` bytes per element, such as a mask
/// or indices.
fn bytes_with(tensor: &TensorIr, size: u64) -> u64 {
    tensor.shape.num_elements() as u64 * size
}

/// Returns the size in bytes of the result if a tensor is reduced along a dimension.
fn bytes_of_rows(tensor: &TensorIr, dim: usize) -> u64 {
    let width = tensor.shape.to_vec().get(dim).copied().unwrap_or(1);
    bytes_of(tensor) / width.max(1) as u64
}

/// Returns the rule of an operation with tracked inputs, or `None` if its output is not tracked.
pub(super) fn rule(
    operation: &OperationIr,
    is_tracked: impl Fn(&TensorIr) -> bool,
) -> Option<Rule> {
    let tracked: Vec<TensorIr> = operation
        .inputs()
        .filter(|it| is_tracked(it))
        .cloned()
        .collect();
    let is_float = operation.outputs().any(|out| out.dtype.is_float());
    if tracked.is_empty() || !is_float {
        return None;
    }
    let shared = |saved: Vec<&TensorIr>| Rule {
        saved: saved.into_iter().cloned().collect(),
        inner: vec![],
        made: vec![],
        inputs: tracked.clone(),
    };
    let made = |saved: Vec<&TensorIr>| Rule {
        made: tracked.clone(),
        ..shared(saved)
    };
    // Each operand is kept if the other operand needs a gradient.
    let product = |lhs: &TensorIr, rhs: &TensorIr| {
        let of = |kept: &TensorIr, other: &TensorIr| is_tracked(other).then(|| kept.clone());
        Rule {
            saved: [of(lhs, rhs), of(rhs, lhs)].into_iter().flatten().collect(),
            ..made(vec![])
        }
    };
    let quotient = |lhs, rhs| {
        let lhs = is_tracked(rhs).then_some(lhs);
        made(lhs.into_iter().chain([rhs]).collect())
    };
    let all = || {
        let inputs = operation.inputs().chain(operation.outputs());
        made(inputs.collect())
    };
    Some(match operation {
        OperationIr::BaseFloat(base) => match base {
            BaseOperationIr::Reshape(_)
            | BaseOperationIr::SwapDims(_)
            | BaseOperationIr::Permute(_) => shared(vec![]),
            BaseOperationIr::Expand(_)
            | BaseOperationIr::Flip(_)
            | BaseOperationIr::Unfold(_)
            | BaseOperationIr::Slice(_)
            | BaseOperationIr::SliceAssign(_)
            | BaseOperationIr::Cat(_)
            | BaseOperationIr::RepeatDim(_)
            | BaseOperationIr::Cast(_) => made(vec![]),
            BaseOperationIr::Select(op) => made(vec![&op.indices]),
            BaseOperationIr::SelectAssign(op) => made(vec![&op.indices]),
            BaseOperationIr::Gather(op) => made(vec![&op.indices]),
            BaseOperationIr::GatherNd(op) => made(vec![&op.indices]),
            BaseOperationIr::MaskWhere(op) => made(vec![&op.mask]),
            BaseOperationIr::MaskFill(op) => made(vec![&op.mask]),
            _ => all(),
        },
        OperationIr::NumericFloat(_, numeric) => match numeric {
            Numeric::Add(op) | Numeric::Sub(op) if op.lhs.shape == op.rhs.shape => shared(vec![]),
            Numeric::Add(_) | Numeric::Sub(_) => made(vec![]),
            Numeric::AddScalar(_) | Numeric::SubScalar(_) | Numeric::RemScalar(_) => shared(vec![]),
            Numeric::MulScalar(_) | Numeric::DivScalar(_) | Numeric::Neg(_) => made(vec![]),
            Numeric::Mul(op) => product(&op.lhs, &op.rhs),
            Numeric::Div(op) | Numeric::Rem(op) => quotient(&op.lhs, &op.rhs),
            Numeric::Sum(_)
            | Numeric::SumDim(_)
            | Numeric::SumDims(_)
            | Numeric::Mean(_)
            | Numeric::MeanDim(_)
            | Numeric::CumSum(_)
            | Numeric::Pad(_)
            | Numeric::Sign(_) => made(vec![]),
            Numeric::Abs(op) => made(vec![&op.input]),
            Numeric::Prod(op) => made(vec![&op.input]),
            Numeric::ProdDim(op) => made(vec![&op.input]),
            Numeric::PowiScalar(op) => made(vec![&op.lhs]),
            Numeric::Powi(op) => made(vec![&op.lhs, &op.rhs]),
            Numeric::Clamp(op) => made(vec![&op.tensor]),
            Numeric::ClampMin(op) | Numeric::ClampMax(op) => made(vec![&op.lhs]),
            // The indices of the selected values are kept.
            Numeric::Max(op) | Numeric::Min(op) => {
                made(vec![]).with_inner([bytes_with(&op.out, INDEX)])
            }
            Numeric::MaxDim(op) | Numeric::MinDim(op) | Numeric::TopK(op) => {
                made(vec![]).with_inner([bytes_with(&op.out, INDEX)])
            }
            Numeric::MaxAbs(op) => made(vec![&op.input]).with_inner([bytes_with(&op.out, INDEX)]),
            Numeric::MaxAbsDim(op) => {
                made(vec![&op.input]).with_inner([bytes_with(&op.out, INDEX)])
            }
            Numeric::Sort(op) => made(vec![]).with_inner([bytes_with(&op.out, INDEX)]),
            Numeric::MaxDimWithIndices(op) | Numeric::MinDimWithIndices(op) => {
                made(vec![&op.out_indices])
            }
            Numeric::TopKWithIndices(op) => made(vec![&op.out_indices]),
            Numeric::SortWithIndices(op) => made(vec![&op.out_indices]),
            _ => all(),
        },
        OperationIr::Float(_, float) => match float {
            FloatOperationIr::Matmul(op) => product(&op.lhs, &op.rhs),
            FloatOperationIr::Round(_)
            | FloatOperationIr::Floor(_)
            | FloatOperationIr::Ceil(_)
            | FloatOperationIr::Trunc(_) => made(vec![]),
            // Elementwise functions of one or two inputs.
            _ => made(operation.inputs().collect()),
        },
        OperationIr::Activation(activation) => match activation {
            Activation::LeakyRelu(op) => made(vec![]).with_inner([bytes_with(&op.out, 1)]),
            Activation::PRelu(op) => product(&op.lhs, &op.rhs).with_inner([bytes_with(&op.out, 1)]),
            // Softmax keeps the shifted logits, their exponentials and the sums. Log-softmax keeps the shifted logits
            // and the sums.
            Activation::Softmax(op) | Activation::Softmin(op) => {
                let of = bytes_of(&op.input);
                made(vec![]).with_inner([of, of, bytes_of_rows(&op.input, op.axis)])
            }
            Activation::LogSoftmax(op) => {
                let rows = bytes_of_rows(&op.input, op.axis);
                made(vec![]).with_inner([bytes_of(&op.input), rows])
            }
            // An elementwise function of the input.
            _ => made(operation.inputs().collect()),
        },
        OperationIr::Module(module) => match module {
            ModuleOperationIr::Linear(op) => product(&op.x, &op.weight),
            ModuleOperationIr::Embedding(op) => made(vec![&op.indices]),
            // LayerNorm keeps the centered input, the normalized input, and two numbers per row.
            ModuleOperationIr::LayerNorm(op) => {
                let of = bytes_of(&op.input);
                let rows = bytes_of_rows(&op.input, op.input.shape.num_dims() - 1);
                made(vec![&op.gamma]).with_inner([of, of, rows, rows])
            }
            // Autodiff keeps three copies of the scores: shifted, as exponentials, and as probabilities.
            ModuleOperationIr::Attention(op) => {
                let (query, key) = (op.query.shape.to_vec(), op.key.shape.to_vec());
                let width = query[query.len() - 1].max(1) as u64;
                let scores = bytes_of(&op.query) / width * key[key.len() - 2] as u64;
                made(operation.inputs().collect()).with_inner([scores, scores, scores])
            }
            // Matrix multiplications, and other functions of the inputs.
            _ => made(operation.inputs().collect()),
        },
        _ => all(),
    })
}

/// Returns the inputs whose memory the output of an operation may reuse. An input can be reused if it has the shape of
/// the output and no other tensor shares its memory. Elementwise operations reuse memory on the CPU and on CubeCL
/// devices.
pub(super) fn reusable<'a>(operation: &'a OperationIr, out: &TensorIr) -> Vec<&'a TensorIr> {
    match operation {
        OperationIr::Custom(kernel) => {
            let pair = in_place(kernel).filter(|(_, output)| output.id == out.id);
            pair.into_iter().map(|(input, _)| input).collect()
        }
        OperationIr::NumericFloat(_, numeric) => match numeric {
            Numeric::Add(op) | Numeric::Sub(op) | Numeric::Mul(op) | Numeric::Div(op) => {
                vec![&op.lhs, &op.rhs]
            }
            Numeric::AddScalar(op)
            | Numeric::SubScalar(op)
            | Numeric::MulScalar(op)
            | Numeric::DivScalar(op)
            | Numeric::ClampMin(op)
            | Numeric::ClampMax(op) => vec![&op.lhs],
            Numeric::Abs(op) | Numeric::Neg(op) | Numeric::Sign(op) => vec![&op.input],
            Numeric::Clamp(op) => vec![&op.tensor],
            _ => vec![],
        },
        OperationIr::Float(_, float) => match float {
            FloatOperationIr::Exp(op)
            | FloatOperationIr::Log(op)
            | FloatOperationIr::Log1p(op)
            | FloatOperationIr::Sqrt(op)
            | FloatOperationIr::Cos(op)
            | FloatOperationIr::Sin(op)
            | FloatOperationIr::Tanh(op)
            | FloatOperationIr::Erf(op)
            | FloatOperationIr::Recip(op) => vec![&op.input],
            FloatOperationIr::PowfScalar(op) => vec![&op.lhs],
            _ => vec![],
        },
        OperationIr::BaseFloat(base) => match base {
            BaseOperationIr::MaskWhere(op) => vec![&op.tensor, &op.value],
            BaseOperationIr::MaskFill(op) => vec![&op.tensor],
            BaseOperationIr::SliceAssign(op) => vec![&op.tensor],
            BaseOperationIr::SelectAssign(op) => vec![&op.tensor],
            _ => vec![],
        },
        _ => vec![],
    }
}

/// Returns the name of an operation in Burn's intermediate representation.
pub fn name(operation: &OperationIr) -> String {
    let text = format!("{operation:?}");
    // The text is for example `NumericFloat(F32, Mul(BinaryOpIr {`.
    let words = text
        .split(['(', ',', ' ', '{'])
        .filter(|word| !word.is_empty());
    let kinds = ["F64", "F32", "F16", "BF16", "Flex32"];
    let mut words = words.filter(|word| !kinds.contains(word));
    let outer = words.next().unwrap_or_default();
    match words.next() {
        Some(inner) => format!("{inner} ({outer})"),
        None => outer.into(),
    }
}
