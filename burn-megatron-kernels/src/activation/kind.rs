//! The activations: the nonlinearity of each, its options and its inputs.

/// The nonlinearity of an MLP.
///
/// A gated activation takes the two halves `a` and `b` of the last dim and returns half the width
/// (Shazeer 2020, "GLU Variants Improve Transformer").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x Phi(x)` with the exact normal distribution (Hendrycks and Gimpel 2016).
    Gelu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, the approximation of GELU used in
    /// GPT-2.
    GeluTanh,
    /// `x sigmoid(1.702 x)`, another approximation of GELU from the same paper.
    QuickGelu,
    /// `max(x, 0)^2` (So et al. 2021, "Primer").
    SquaredRelu,
    /// `a sigmoid(a) b`.
    SwiGlu,
    /// [`GeluTanh`](Self::GeluTanh) of `a`, times `b`.
    GeGlu,
    /// [`QuickGelu`](Self::QuickGelu) of `a`, times `b`.
    QuickGeGlu,
}

/// The nonlinearity of one value, without the gate.
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
    /// Returns whether the input is twice as wide as the output.
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
    /// Clamp limit `c`, applied after the bias: the first half becomes `min(a, c)` and the second
    /// half `min(max(b, -c), c)`. Gradients are zero outside these bounds.
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
