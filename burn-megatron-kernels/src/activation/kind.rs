//! The activations, and the nonlinearity of each.

/// The nonlinearity of an MLP.
///
/// A gated one takes the two halves `a` and `b` of the last dim and gives half the width (Shazeer
/// 2020, "GLU Variants Improve Transformer").
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Activation {
    /// `x Phi(x)`, with the exact normal distribution (Hendrycks and Gimpel 2016).
    Gelu,
    /// `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`, its approximation in GPT-2.
    GeluTanh,
    /// `x sigmoid(1.702 x)`, the other approximation of the same paper.
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

/// The nonlinearity of one value, gated or not.
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
    /// Whether the input is twice as wide as the output.
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

    /// The width of the output.
    pub(crate) fn output_width(self, width: usize) -> usize {
        if self.is_gated() { width / 2 } else { width }
    }
}
