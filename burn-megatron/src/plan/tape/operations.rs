//! What Burn's own differentiable operations keep for their backward, and what that backward allocates.
//!
//! As in `burn-autodiff` 0.22.1 without gradient checkpointing. `proof` in `tests/tests/plan_memory.rs` counts the same bytes on
//! the heap.

use burn_ir::{
    BaseOperationIr, FloatOperationIr, NumericOperationIr as Numeric, OperationIr, TensorIr,
};

/// The backward of an operation.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Rule {
    /// What is kept.
    pub saved: Vec<TensorIr>,
    /// The tracked inputs whose gradients are new tensors; those of the others share the memory of the output's.
    pub made: Vec<TensorIr>,
    /// The tracked inputs that have a gradient.
    pub inputs: Vec<TensorIr>,
}

/// The rule of an operation with tracked inputs; `None` if its output is not tracked.
///
/// # Errors
///
/// The name of an operation without a rule.
pub(super) fn rule(
    operation: &OperationIr,
    is_tracked: impl Fn(&TensorIr) -> bool,
) -> Result<Option<Rule>, String> {
    let tracked: Vec<TensorIr> = operation
        .inputs()
        .filter(|it| is_tracked(it))
        .cloned()
        .collect();
    let is_float = operation.outputs().any(|out| out.dtype.is_float());
    if tracked.is_empty() || !is_float {
        return Ok(None);
    }
    let shared = |saved: Vec<&TensorIr>| Rule {
        saved: saved.into_iter().cloned().collect(),
        made: vec![],
        inputs: tracked.clone(),
    };
    let made = |saved: Vec<&TensorIr>| Rule {
        made: tracked.clone(),
        ..shared(saved)
    };
    // Each operand is kept for the gradient of the other.
    let product = |lhs: &TensorIr, rhs: &TensorIr| {
        let of = |kept: &TensorIr, other: &TensorIr| is_tracked(other).then(|| kept.clone());
        Rule {
            saved: [of(lhs, rhs), of(rhs, lhs)].into_iter().flatten().collect(),
            ..made(vec![])
        }
    };
    Ok(Some(match operation {
        OperationIr::BaseFloat(base) => match base {
            BaseOperationIr::Reshape(_)
            | BaseOperationIr::SwapDims(_)
            | BaseOperationIr::Permute(_) => shared(vec![]),
            BaseOperationIr::Expand(_)
            | BaseOperationIr::Flip(_)
            | BaseOperationIr::Slice(_)
            | BaseOperationIr::SliceAssign(_)
            | BaseOperationIr::Cat(_)
            | BaseOperationIr::RepeatDim(_)
            | BaseOperationIr::Cast(_) => made(vec![]),
            BaseOperationIr::Select(op) => made(vec![&op.indices]),
            BaseOperationIr::Gather(op) => made(vec![&op.indices]),
            BaseOperationIr::MaskWhere(op) => made(vec![&op.mask]),
            BaseOperationIr::MaskFill(op) => made(vec![&op.mask]),
            _ => return Err(name(operation)),
        },
        OperationIr::NumericFloat(_, numeric) => match numeric {
            Numeric::Add(op) | Numeric::Sub(op) if op.lhs.shape == op.rhs.shape => shared(vec![]),
            Numeric::Add(_) | Numeric::Sub(_) => made(vec![]),
            Numeric::AddScalar(_) | Numeric::SubScalar(_) => shared(vec![]),
            Numeric::MulScalar(_) | Numeric::DivScalar(_) | Numeric::Neg(_) => made(vec![]),
            Numeric::Mul(op) => product(&op.lhs, &op.rhs),
            Numeric::Div(op) => {
                let lhs = is_tracked(&op.rhs).then_some(&op.lhs);
                made(lhs.into_iter().chain([&op.rhs]).collect())
            }
            Numeric::Sum(_)
            | Numeric::SumDim(_)
            | Numeric::Mean(_)
            | Numeric::MeanDim(_)
            | Numeric::CumSum(_) => made(vec![]),
            Numeric::Abs(op) => made(vec![&op.input]),
            Numeric::PowiScalar(op) => made(vec![&op.lhs]),
            Numeric::Clamp(op) => made(vec![&op.tensor]),
            Numeric::ClampMin(op) | Numeric::ClampMax(op) => made(vec![&op.lhs]),
            _ => return Err(name(operation)),
        },
        OperationIr::Float(_, float) => match float {
            FloatOperationIr::Matmul(op) => product(&op.lhs, &op.rhs),
            FloatOperationIr::Exp(op)
            | FloatOperationIr::Log(op)
            | FloatOperationIr::Log1p(op)
            | FloatOperationIr::Sqrt(op)
            | FloatOperationIr::Recip(op)
            | FloatOperationIr::Tanh(op)
            | FloatOperationIr::Sin(op)
            | FloatOperationIr::Cos(op)
            | FloatOperationIr::Erf(op) => made(vec![&op.input]),
            FloatOperationIr::PowfScalar(op) => made(vec![&op.lhs]),
            _ => return Err(name(operation)),
        },
        _ => return Err(name(operation)),
    }))
}

/// The name of an operation, as Burn's intermediate representation has it.
pub(crate) fn name(operation: &OperationIr) -> String {
    let text = format!("{operation:?}");
    // `NumericFloat(F32, Mul(BinaryOpIr {` and its like.
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
