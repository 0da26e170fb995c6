//! Which operations run as fused kernels, and why.
//!
//! Every operation of the [kernels crate](crate::kernels) has two forms that compute the same: a
//! fused kernel with a backward of its own, and a composition of Burn's operations. [`Choices`] is
//! what a user asks for, [`Chosen`] what was decided for a device and a type.

use std::fmt::{self, Display};
use std::str::FromStr;

use burn::tensor::{DType, Device};
use serde::{Deserialize, Serialize};

/// An operation with two forms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// LayerNorm and RMSNorm, with the residual addition.
    Norm,
    /// The nonlinearity of the MLP with its bias.
    Activation,
    /// Bias, dropout and residual addition.
    Dropout,
    /// Rotary positions.
    Rope,
    /// Scores, softmax and weighted sum, without the scores in memory.
    Attention,
    /// Scale, mask and softmax of scores, where attention is not fused.
    Softmax,
    /// Cross entropy.
    Loss,
    /// Matrix products: bias, and sums of weight gradients, inside of the product.
    Linear,
    /// AdamW and the sum of squares of the gradient norm.
    Optimizer,
}

impl Operation {
    /// All of them, in the order of a step.
    pub const ALL: [Self; 9] = [
        Self::Norm,
        Self::Activation,
        Self::Dropout,
        Self::Rope,
        Self::Attention,
        Self::Softmax,
        Self::Loss,
        Self::Linear,
        Self::Optimizer,
    ];

    /// As recipes and flags write it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Norm => "norm",
            Self::Activation => "activation",
            Self::Dropout => "dropout",
            Self::Rope => "rope",
            Self::Attention => "attention",
            Self::Softmax => "softmax",
            Self::Loss => "loss",
            Self::Linear => "linear",
            Self::Optimizer => "optimizer",
        }
    }
}

/// What a user asks for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Choice {
    /// Fused where the device has the kernel and it is the faster form.
    #[default]
    Auto,
    /// Fused, or an error that says why it cannot be.
    Fused,
    /// Burn's own operations.
    Unfused,
}

/// A choice for each operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Choices {
    /// See [`Operation::Norm`].
    pub norm: Choice,
    /// See [`Operation::Activation`].
    pub activation: Choice,
    /// See [`Operation::Dropout`].
    pub dropout: Choice,
    /// See [`Operation::Rope`].
    pub rope: Choice,
    /// See [`Operation::Attention`].
    pub attention: Choice,
    /// See [`Operation::Softmax`].
    pub softmax: Choice,
    /// See [`Operation::Loss`].
    pub loss: Choice,
    /// See [`Operation::Linear`].
    pub linear: Choice,
    /// See [`Operation::Optimizer`].
    pub optimizer: Choice,
}

impl Choices {
    /// The same choice for every operation.
    pub fn all(choice: Choice) -> Self {
        let mut choices = Self::default();
        for operation in Operation::ALL {
            *choices.of_mut(operation) = choice;
        }
        choices
    }

    /// The choice for one operation.
    pub fn of(&self, operation: Operation) -> Choice {
        let mut choices = *self;
        *choices.of_mut(operation)
    }

    /// The place of one operation's choice.
    pub fn of_mut(&mut self, operation: Operation) -> &mut Choice {
        match operation {
            Operation::Norm => &mut self.norm,
            Operation::Activation => &mut self.activation,
            Operation::Dropout => &mut self.dropout,
            Operation::Rope => &mut self.rope,
            Operation::Attention => &mut self.attention,
            Operation::Softmax => &mut self.softmax,
            Operation::Loss => &mut self.loss,
            Operation::Linear => &mut self.linear,
            Operation::Optimizer => &mut self.optimizer,
        }
    }

    /// Sets choices from `fused`, `unfused`, `auto`, or a list such as `norm=unfused,loss=fused`.
    ///
    /// # Errors
    ///
    /// [`ChoiceError`] for a name that is none.
    pub fn set(&mut self, text: &str) -> Result<(), ChoiceError> {
        for part in text.split(',').map(str::trim) {
            match part.split_once('=') {
                None => *self = Self::all(part.parse()?),
                Some((name, choice)) => {
                    let operation = Operation::ALL.into_iter().find(|o| o.name() == name);
                    let operation = operation.ok_or_else(|| ChoiceError::Operation(name.into()))?;
                    *self.of_mut(operation) = choice.parse()?;
                }
            }
        }
        Ok(())
    }
}

impl FromStr for Choice {
    type Err = ChoiceError;

    fn from_str(text: &str) -> Result<Self, ChoiceError> {
        match text {
            "auto" => Ok(Self::Auto),
            "fused" => Ok(Self::Fused),
            "unfused" => Ok(Self::Unfused),
            other => Err(ChoiceError::Choice(other.into())),
        }
    }
}

/// A choice that cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChoiceError {
    /// An operation that there is not.
    #[error("`{0}` is no operation with kernels; {names} are", names = names())]
    Operation(String),
    /// A choice that there is not.
    #[error("`{0}` is no choice of kernels; auto, fused and unfused are")]
    Choice(String),
    /// Fused was asked for, and cannot be.
    #[error("kernels: {name} cannot be fused: {reason}; auto or unfused can be chosen",
        name = .operation.name())]
    NotFused {
        /// The operation.
        operation: Operation,
        /// Why not.
        reason: String,
    },
}

fn names() -> String {
    Operation::ALL.map(Operation::name).join(", ")
}

/// What was decided for one operation.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Decision {
    fused: bool,
    reason: String,
}

/// What was decided for every operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chosen {
    choices: Choices,
    decisions: Vec<Decision>,
}

impl Chosen {
    /// Decides for tensors of `dtype` on `device`.
    ///
    /// # Errors
    ///
    /// [`ChoiceError::NotFused`] where a kernel was asked for that the device does not have.
    pub fn new(choices: &Choices, device: &Device, dtype: DType) -> Result<Self, ChoiceError> {
        let mut chosen = Self {
            choices: *choices,
            decisions: vec![],
        };
        for operation in Operation::ALL {
            let missing = missing(operation, device, dtype);
            let decision = decide(operation, choices.of(operation), missing)?;
            chosen.decisions.push(decision);
        }
        Ok(chosen)
    }

    /// Whether an operation is fused.
    pub fn is_fused(&self, operation: Operation) -> bool {
        self.decisions[operation as usize].fused
    }

    /// Decides again for an operation that something in the model keeps from being fused.
    ///
    /// # Errors
    ///
    /// [`ChoiceError::NotFused`] where the kernel was asked for.
    pub fn keep_unfused(
        &mut self,
        operation: Operation,
        reason: impl Into<String>,
    ) -> Result<(), ChoiceError> {
        let choice = self.choices.of(operation);
        self.decisions[operation as usize] = decide(operation, choice, Some(reason.into()))?;
        Ok(())
    }

    /// Decides again for an operation that is the faster one unfused, where the choice is automatic.
    pub fn prefer_unfused(&mut self, operation: Operation, reason: impl Into<String>) {
        if self.choices.of(operation) == Choice::Auto {
            self.decisions[operation as usize] = Decision {
                fused: false,
                reason: reason.into(),
            };
        }
    }
}

/// Why the device has no kernel for this type, if it has none.
fn missing(operation: Operation, device: &Device, dtype: DType) -> Option<String> {
    let is_cpu = *device == Device::flex();
    // Whatever the model computes in, its weights are stepped in f32 at least.
    let dtype = match operation {
        Operation::Optimizer if dtype != DType::F64 => DType::F32,
        _ => dtype,
    };
    if !is_cpu && dtype == DType::F64 {
        return Some("kernels for GPUs compute in f32".into());
    }
    (!device.supports_dtype(dtype)).then(|| format!("the device has no {dtype:?}"))
}

fn decide(
    operation: Operation,
    choice: Choice,
    obstacle: Option<String>,
) -> Result<Decision, ChoiceError> {
    let (fused, reason) = match (choice, obstacle) {
        (Choice::Unfused, _) => (false, "asked for".into()),
        (Choice::Fused, None) => (true, "asked for".into()),
        (Choice::Auto, None) => (true, "the device has the kernel".into()),
        (Choice::Auto, Some(reason)) => (false, reason),
        (Choice::Fused, Some(reason)) => return Err(ChoiceError::NotFused { operation, reason }),
    };
    Ok(Decision { fused, reason })
}

/// `fused: norm, loss (the device has the kernel); unfused: attention (dropout of ...)`
impl Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<(&Decision, Vec<&str>)> = vec![];
        for (operation, decision) in Operation::ALL.iter().zip(&self.decisions) {
            match groups.iter_mut().find(|(other, _)| *other == decision) {
                Some((_, names)) => names.push(operation.name()),
                None => groups.push((decision, vec![operation.name()])),
            }
        }
        groups.sort_by_key(|(decision, _)| !decision.fused);
        for (i, (decision, names)) in groups.iter().enumerate() {
            let separator = if i == 0 { "" } else { "; " };
            let form = if decision.fused { "fused" } else { "unfused" };
            let names = names.join(", ");
            write!(f, "{separator}{form}: {names} ({})", decision.reason)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(choices: &str) -> Result<Chosen, ChoiceError> {
        let mut all = Choices::default();
        all.set(choices)?;
        Chosen::new(&all, &Device::flex(), DType::F32)
    }

    #[test]
    fn choices_are_read_and_reasons_are_given() {
        let mut chosen = chosen("unfused,norm=fused,loss=auto").unwrap();
        assert!(chosen.is_fused(Operation::Norm) && chosen.is_fused(Operation::Loss));
        assert!(!chosen.is_fused(Operation::Attention));
        assert_eq!(
            chosen.to_string(),
            "fused: norm (asked for); fused: loss (the device has the kernel); unfused: activation, \
             dropout, rope, attention, softmax, linear, optimizer (asked for)",
        );
        chosen.keep_unfused(Operation::Loss, "of a test").unwrap();
        assert!(!chosen.is_fused(Operation::Loss));
        assert!(chosen.to_string().ends_with("; unfused: loss (of a test)"));
        // What was asked for stays; what was not may go.
        chosen.prefer_unfused(Operation::Norm, "slower");
        chosen.prefer_unfused(Operation::Loss, "slower");
        assert!(chosen.is_fused(Operation::Norm));
        assert!(chosen.to_string().ends_with("; unfused: loss (slower)"));
    }

    #[test]
    fn what_cannot_be_chosen_is_an_error() {
        let error = |text| chosen(text).unwrap_err().to_string();
        assert!(error("nrom=fused").starts_with("`nrom` is no operation with kernels; norm, "));
        assert!(error("norm=on").starts_with("`on` is no choice of kernels; auto, fused"));
        let error = chosen("attention=fused")
            .unwrap()
            .keep_unfused(Operation::Attention, "of a test")
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "kernels: attention cannot be fused: of a test; auto or unfused can be chosen",
        );
    }

    #[test]
    fn operations_stand_in_their_order() {
        for (i, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, i);
            let mut choices = Choices::default();
            choices
                .set(&format!("{}=unfused", operation.name()))
                .unwrap();
            assert_eq!(choices.of(operation), Choice::Unfused);
            assert_ne!(choices, Choices::default());
        }
    }
}
