//! What a rank does in one step of a schedule, and how it is written.

use std::fmt;
use std::str::FromStr;

/// The sort of an [`Action`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActionKind {
    /// Computes the stage's output from its input.
    Forward,
    /// Computes the gradients of the input and of the weights: an input gradient followed at once
    /// by a weight gradient.
    Backward,
    /// Computes the gradient of the stage's input alone.
    InputGradient,
    /// Computes the gradients of the stage's weights, which an input gradient left for later.
    WeightGradient,
    /// Sends the stage's output to the next stage.
    SendActivation,
    /// Receives the stage's input from the stage before.
    ReceiveActivation,
    /// Sends the gradient of the stage's input to the stage before.
    SendGradient,
    /// Receives the gradient of the stage's output from the next stage.
    ReceiveGradient,
}

impl ActionKind {
    /// Every kind.
    pub const ALL: [ActionKind; 8] = [
        ActionKind::Forward,
        ActionKind::Backward,
        ActionKind::InputGradient,
        ActionKind::WeightGradient,
        ActionKind::SendActivation,
        ActionKind::ReceiveActivation,
        ActionKind::SendGradient,
        ActionKind::ReceiveGradient,
    ];

    /// The letters that stand for the kind: `F`, `B`, `I`, `W`, `SF`, `RF`, `SB` and `RB`.
    pub const fn code(self) -> &'static str {
        match self {
            ActionKind::Forward => "F",
            ActionKind::Backward => "B",
            ActionKind::InputGradient => "I",
            ActionKind::WeightGradient => "W",
            ActionKind::SendActivation => "SF",
            ActionKind::ReceiveActivation => "RF",
            ActionKind::SendGradient => "SB",
            ActionKind::ReceiveGradient => "RB",
        }
    }

    /// The kind in words, as in `input gradient`.
    pub const fn words(self) -> &'static str {
        match self {
            ActionKind::Forward => "forward",
            ActionKind::Backward => "backward",
            ActionKind::InputGradient => "input gradient",
            ActionKind::WeightGradient => "weight gradient",
            ActionKind::SendActivation => "sending the activation",
            ActionKind::ReceiveActivation => "receiving the activation",
            ActionKind::SendGradient => "sending the gradient",
            ActionKind::ReceiveGradient => "receiving the gradient",
        }
    }

    /// Whether this computes rather than sends or receives.
    pub const fn is_compute(self) -> bool {
        !self.is_send() && !self.is_receive()
    }

    /// Whether this sends something to another rank.
    pub const fn is_send(self) -> bool {
        matches!(self, ActionKind::SendActivation | ActionKind::SendGradient)
    }

    /// Whether this receives something from another rank.
    pub const fn is_receive(self) -> bool {
        matches!(
            self,
            ActionKind::ReceiveActivation | ActionKind::ReceiveGradient
        )
    }

    /// Whether this computes the gradient of a stage's input, alone or with that of the weights.
    pub const fn gives_input_gradient(self) -> bool {
        matches!(self, ActionKind::Backward | ActionKind::InputGradient)
    }
}

impl fmt::Display for ActionKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.words())
    }
}

/// One step of a rank.
///
/// Written as its kind, its stage and its micro-batch, both counted from 0: `F 2 5` is the forward
/// pass of micro-batch 5 through stage 2, and `RF 2 5` is the receipt of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Action {
    /// What is done.
    pub kind: ActionKind,
    /// The stage for which it is done, one of the rank's own.
    pub stage: usize,
    /// The micro-batch with which it is done.
    pub micro_batch: usize,
}

impl Action {
    /// An action.
    pub const fn new(kind: ActionKind, stage: usize, micro_batch: usize) -> Self {
        Action {
            kind,
            stage,
            micro_batch,
        }
    }

    /// The other end of a send or a receive: `SF 1 0` and `RF 2 0`, or `SB 2 0` and `RB 1 0`.
    ///
    /// `None` for a computation, and where the neighbouring stage would be below 0. Whether there
    /// is a stage above is for the schedule to say.
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

    /// The action in words: `forward of stage 2, micro-batch 5`.
    pub fn describe(&self) -> String {
        format!(
            "{} of stage {}, micro-batch {}",
            self.kind, self.stage, self.micro_batch
        )
    }
}

impl fmt::Display for Action {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{} {} {}", self.kind.code(), self.stage, self.micro_batch);
        f.pad(&text)
    }
}

/// A text that is no action.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "\"{text}\" is no action: write a kind, a stage and a micro-batch, as in \"F 2 5\"; the kinds \
     are F, B, I, W, SF, RF, SB and RB"
)]
pub struct NoAction {
    /// The text.
    pub text: String,
}

impl FromStr for Action {
    type Err = NoAction;

    fn from_str(text: &str) -> Result<Self, NoAction> {
        let parse = || {
            let mut words = text.split_whitespace();
            let code = words.next()?;
            let kind = ActionKind::ALL
                .into_iter()
                .find(|kind| kind.code() == code)?;
            let stage = words.next()?.parse().ok()?;
            let micro_batch = words.next()?.parse().ok()?;
            words
                .next()
                .is_none()
                .then_some(Action::new(kind, stage, micro_batch))
        };
        parse().ok_or_else(|| NoAction { text: text.into() })
    }
}
