//! The activation functions, their options and their inputs.

/// The activation function of an MLP.
///
/// A gated activation splits the last dimension into two halves `a` and `b`. Its output has half the width of its input
/// (Shazeer 2020, "GLU Variants Improve Transformer").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x Phi(x)`, where `Phi` is the exact cumulative distribution function of the standard normal distribution
    /// (Hendrycks and Gimpel 2016).
    Gelu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, the approximation of GELU used in
    /// GPT-2.
    GeluTanh,
    /// `x sigmoid(1.702 x)`, another approximation of GELU by Hendrycks and Gimpel.
    QuickGelu,
    /// `max(x, 0)^2` (So et al. 2021, "Primer").
    SquaredRelu,
    /// `a sigmoid(a) b`.
    SwiGlu,
    /// `GeluTanh(a) b`, see [`GeluTanh`](Self::GeluTanh).
    GeGlu,
    /// `QuickGelu(a) b`, see [`QuickGelu`](Self::QuickGelu).
    QuickGeGlu,
}

/// The nonlinearity of an activation without its gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "cubecl", derive(serde::Serialize, serde::Deserialize))]
pub(crate) enum Curve {
    Normal,
    Tanh,
    Quick,
    Silu,
    SquaredRelu,
}

impl Activation {
    /// Returns whether the activation is gated, so that its input is twice as wide as its output.
    pub fn is_gated(self) -> bool {
        matches!(self, Self::SwiGlu | Self::GeGlu | Self::QuickGeGlu)
    }

    pub(crate) fn curve(self) -> Curve {
        match self {
            Self::Gelu => Curve::Normal,
            Self::GeluTanh | Self::GeGlu => Curve::Tanh,
            Self::QuickGelu | Self::QuickGeGlu => Curve::Quick,
            Self::SwiGlu => Curve::Silu,
            Self::SquaredRelu => Curve::SquaredRelu,
        }
    }

    /// Returns the width of the output.
    pub(crate) fn output_width(self, width: usize) -> usize {
        if self.is_gated() { width / 2 } else { width }
    }
}

/// Options of a gated [`Activation`].
#[derive(Clone, Copy, Debug, PartialEq, Default)]
pub struct ActivationOptions {
    /// Clamp limit `c`, applied after the bias. The first half becomes `min(a, c)` and the second half becomes
    /// `min(max(b, -c), c)`. Gradients are zero outside these bounds.
    pub clamp: Option<f64>,
    /// The offset added to the second half after the clamp (1 in gpt-oss).
    pub offset: f64,
}

/// An activation with its inputs: `x`, then the bias and the row weight if present.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FusedActivation {
    pub kind: Activation,
    pub options: ActivationOptions,
    pub bias: bool,
    pub weight: bool,
}

impl FusedActivation {
    /// Returns an activation without a bias and a row weight.
    pub(super) fn plain(kind: Activation) -> Self {
        Self {
            kind,
            options: ActivationOptions::default(),
            bias: false,
            weight: false,
        }
    }

    /// Splits the inputs into `x`, bias and row weight.
    pub fn split<T>(&self, inputs: impl IntoIterator<Item = T>) -> (T, Option<T>, Option<T>) {
        let mut inputs = inputs.into_iter();
        let Some(x) = inputs.next() else {
            unreachable!("the function is applied to `x` first")
        };
        let bias = self.bias.then(|| inputs.next()).flatten();
        let weight = self.weight.then(|| inputs.next()).flatten();
        (x, bias, weight)
    }
}
