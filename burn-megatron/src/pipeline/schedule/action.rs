//! The actions of a schedule, and their text form.

use std::fmt;
use std::str::FromStr;

use strum::VariantArray;

/// The kind of an [`Action`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, VariantArray)]
pub enum ActionKind {
    /// The forward of a stage: computes the output of the stage from its input.
    Forward,
    /// The forward of a pair. It runs together with the next action in the list, which is the backward of another
    /// micro-batch. A pair starts when the inputs of the forward and of the backward are available. The results of the
    /// pair are sent when both computations have finished.
    PairedForward,
    /// The complete backward of a stage: computes the gradient of the stage's input and then the gradients of its
    /// weights.
    Backward,
    /// The first part of a split backward: computes only the gradient of the stage's input.
    InputGradient,
    /// The second part of a split backward: computes the gradients of the stage's weights, which an earlier
    /// [`InputGradient`](Self::InputGradient) has deferred.
    WeightGradient,
    /// Sends the stage's output to the next stage.
    SendActivation,
    /// Receives the stage's input from the previous stage.
    ReceiveActivation,
    /// Sends the gradient of the stage's input to the previous stage.
    SendGradient,
    /// Receives the gradient of the stage's output from the next stage.
    ReceiveGradient,
    /// Starts the reduction of the stage's gradients over the data axis. No forward of the stage follows. After this
    /// action, a gradient is reduced as soon as all uses of its parameter have had their backward. The rank continues
    /// with its next actions in the meantime. The action takes no time and has no micro-batch.
    ReduceGradients,
}

impl ActionKind {
    /// All kinds of actions.
    pub const ALL: &'static [Self] = Self::VARIANTS;

    /// Returns the code of the kind in CSV files: `F`, `FB`, `B`, `I`, `W`, `SF`, `RF`, `SB`, `RB` or `RG`.
    pub const fn code(self) -> &'static str {
        self.names().0
    }

    /// Returns a description of the kind, such as `input gradient`.
    pub const fn description(self) -> &'static str {
        self.names().1
    }

    /// Returns the code and the description.
    const fn names(self) -> (&'static str, &'static str) {
        match self {
            ActionKind::Forward => ("F", "forward"),
            ActionKind::PairedForward => ("FB", "paired forward"),
            ActionKind::Backward => ("B", "backward"),
            ActionKind::InputGradient => ("I", "input gradient"),
            ActionKind::WeightGradient => ("W", "weight gradient"),
            ActionKind::SendActivation => ("SF", "sending the activation"),
            ActionKind::ReceiveActivation => ("RF", "receiving the activation"),
            ActionKind::SendGradient => ("SB", "sending the gradient"),
            ActionKind::ReceiveGradient => ("RB", "receiving the gradient"),
            ActionKind::ReduceGradients => ("RG", "reducing the gradients"),
        }
    }

    /// Whether this kind is a computation: a forward, a backward or a part of a split backward.
    pub const fn is_compute(self) -> bool {
        matches!(
            self,
            ActionKind::Forward
                | ActionKind::PairedForward
                | ActionKind::Backward
                | ActionKind::InputGradient
                | ActionKind::WeightGradient
        )
    }

    /// Whether this kind is a forward, either alone or in a pair.
    pub const fn is_forward(self) -> bool {
        matches!(self, ActionKind::Forward | ActionKind::PairedForward)
    }

    /// Whether this kind is a send to another rank.
    pub const fn is_send(self) -> bool {
        matches!(self, ActionKind::SendActivation | ActionKind::SendGradient)
    }

    /// Whether this kind is a receive from another rank.
    pub const fn is_receive(self) -> bool {
        matches!(
            self,
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient
        )
    }

    /// Whether this kind is a send or a receive.
    pub const fn is_transfer(self) -> bool {
        self.is_send() || self.is_receive()
    }

    /// Whether this kind computes the gradient of a stage's input, with or without the gradients of the weights.
    pub const fn computes_input_gradient(self) -> bool {
        matches!(self, ActionKind::Backward | ActionKind::InputGradient)
    }
}

impl fmt::Display for ActionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.description())
    }
}

/// One action of a rank in a pipeline schedule.
///
/// The text form of an action is the code of the kind, the stage and the micro-batch. Stages and micro-batches are
/// counted from 0. `F 2 5` is the forward of micro-batch 5 through stage 2, and `RF 2 5` receives its input. `RG 2`
/// reduces the gradients of stage 2 and has no micro-batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// The kind.
    pub kind: ActionKind,
    /// The stage, which must be on the rank of the action.
    pub stage: usize,
    /// The micro-batch. It is 0 for [`ActionKind::ReduceGradients`], which has no micro-batch.
    pub micro_batch: usize,
}

impl Action {
    /// Creates an action for a micro-batch.
    pub const fn new(kind: ActionKind, stage: usize, micro_batch: usize) -> Self {
        Action {
            kind,
            stage,
            micro_batch,
        }
    }

    /// Creates the action that starts the reduction of a stage's gradients.
    pub const fn reduce_gradients(stage: usize) -> Self {
        Action::new(ActionKind::ReduceGradients, stage, 0)
    }

    /// Returns the matching receive of a send, or the matching send of a receive. For example, `SF 1 0` matches
    /// `RF 2 0`, and `SB 2 0` matches `RB 1 0`.
    ///
    /// Returns `None` for any other action, and if the number of the adjacent stage would be negative. The maximum
    /// number of stages is not checked.
    pub fn counterpart(&self) -> Option<Action> {
        let below = self.stage.checked_sub(1);
        let above = self.stage.checked_add(1);
        let (kind, stage) = match self.kind {
            ActionKind::SendActivation => (ActionKind::ReceiveActivation, above),
            ActionKind::ReceiveActivation => (ActionKind::SendActivation, below),
            ActionKind::SendGradient => (ActionKind::ReceiveGradient, below),
            ActionKind::ReceiveGradient => (ActionKind::SendGradient, above),
            _ => return None,
        };
        Some(Action::new(kind, stage?, self.micro_batch))
    }

    /// Returns a description of the action, such as `forward of stage 2, micro-batch 5`.
    pub fn describe(&self) -> String {
        let stage = format!("{} of stage {}", self.kind, self.stage);
        match self.kind {
            ActionKind::ReduceGradients => stage,
            _ => format!("{stage}, micro-batch {}", self.micro_batch),
        }
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = format!("{} {}", self.kind.code(), self.stage);
        match self.kind {
            ActionKind::ReduceGradients => f.pad(&stage),
            _ => f.pad(&format!("{stage} {}", self.micro_batch)),
        }
    }
}

/// The error for a text that cannot be parsed as an [`Action`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "invalid action \"{text}\": expected a kind (F, B, I, W, SF, RF, SB or RB), a stage and a micro-batch, as in \"F 2 \
     5\", FB with the stage and micro-batch of a forward and of a backward, as in \"FB 2 5 2 3\", or RG and a stage, \
     as in \"RG 2\""
)]
pub struct ParseActionError {
    /// The invalid text.
    pub text: String,
}

impl FromStr for Action {
    type Err = ParseActionError;

    fn from_str(text: &str) -> Result<Self, ParseActionError> {
        let parse = || {
            let mut words = text.split_whitespace();
            let code = words.next()?;
            let mut kinds = ActionKind::ALL.iter().copied();
            let kind = kinds.find(|kind| kind.code() == code)?;
            let stage = words.next()?.parse().ok()?;
            let micro_batch = match kind {
                ActionKind::ReduceGradients => 0,
                _ => words.next()?.parse().ok()?,
            };
            words
                .next()
                .is_none()
                .then_some(Action::new(kind, stage, micro_batch))
        };
        parse().ok_or_else(|| ParseActionError { text: text.into() })
    }
}
