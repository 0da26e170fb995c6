//! Epilogues with GELU: the values that are saved for the backward pass, and the formulas.
//!
//! `GELU_AUX` stores `x`, the sum with its bias, in an auxiliary matrix, and returns `gelu(x)`. `DGELU` returns the
//! sum times the derivative of GELU at the auxiliary matrix. `BGRAD` adds the sums of this product over the columns,
//! one sum per row.

use super::attributes::{Attributes, description as of};
use super::rules::Matrix;
use super::{Refusal, invalid, unsupported};
use crate::element::Element;

/// The emulated values of `cublasLtEpilogue_t`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Epilogue {
    /// Whether a bias is added or, for a [gradient](Gelu::Gradient), its gradient is computed.
    pub bias: bool,
    pub gelu: Option<Gelu>,
}

/// Direction of GELU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Gelu {
    Forward,
    Gradient,
}

/// The auxiliary matrix of a product. Its size is the size of `D`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Auxiliary {
    pub gelu: Gelu,
    pub matrix: Matrix,
}

/// The alignment of the address of an auxiliary matrix, in bytes.
pub(super) const ALIGNMENT: u64 = 16;

/// The alignment of the leading dimension of an auxiliary matrix, in elements.
const LEADING: usize = 8;

impl Epilogue {
    pub(super) fn of(description: &Attributes) -> Result<Self, Refusal> {
        let (bias, gelu) = match description.int(of::EPILOGUE) {
            // CUBLASLT_EPILOGUE_DEFAULT and _BIAS.
            1 => (false, None),
            4 => (true, None),
            // _GELU_AUX and _GELU_AUX_BIAS.
            160 => (false, Some(Gelu::Forward)),
            164 => (true, Some(Gelu::Forward)),
            // _DGELU and _DGELU_BGRAD.
            192 => (false, Some(Gelu::Gradient)),
            208 => (true, Some(Gelu::Gradient)),
            other => {
                return Err(unsupported(format!(
                    "the epilogue is {other}: DEFAULT, BIAS, GELU_AUX, GELU_AUX_BIAS, DGELU and DGELU_BGRAD are \
                     emulated"
                )));
            }
        };
        Ok(Self { bias, gelu })
    }

    /// Returns the auxiliary matrix of a product with this `D`.
    pub(super) fn auxiliary(
        self,
        description: &Attributes,
        d: &Matrix,
    ) -> Result<Option<Auxiliary>, Refusal> {
        let address = description.get(of::EPILOGUE_AUX_POINTER);
        let Some(gelu) = self.gelu else {
            return if address == 0 {
                Ok(None)
            } else {
                Err(unsupported(
                    "EPILOGUE_AUX_POINTER is set, and the epilogue has no auxiliary matrix",
                ))
            };
        };
        if d.element.is_narrow() || d.element == Element::F64 {
            return Err(unsupported(format!(
                "GELU with D in {:?}: f32, f16 and bf16 are emulated",
                d.element
            )));
        }
        // The heuristic also uses the alignment of this address.
        if address == 0 || !address.is_multiple_of(ALIGNMENT) {
            return Err(invalid(format!(
                "EPILOGUE_AUX_POINTER is {address:#x}: a multiple of {ALIGNMENT} bytes is needed"
            )));
        }
        match description.int(of::EPILOGUE_AUX_DATA_TYPE) {
            -1 => {}
            number if Element::of(number) == Some(d.element) => {}
            number => {
                return Err(unsupported(format!(
                    "the type of the auxiliary matrix is {number}: that of D fits"
                )));
            }
        }
        let leading = usize::try_from(description.get(of::EPILOGUE_AUX_LD) as i64);
        let leading = leading.map_err(|_| invalid("EPILOGUE_AUX_LD is negative"))?;
        if leading < d.rows || !leading.is_multiple_of(LEADING) {
            return Err(invalid(format!(
                "EPILOGUE_AUX_LD is {leading}: a multiple of {LEADING} of at least {} is needed",
                d.rows
            )));
        }
        let bytes = leading
            .checked_mul(d.columns)
            .and_then(|all| all.checked_mul(8));
        if bytes.is_none() {
            return Err(invalid("the auxiliary matrix is larger than any memory"));
        }
        let matrix = Matrix { leading, ..*d };
        Ok(Some(Auxiliary { gelu, matrix }))
    }
}

/// `sqrt(2 / pi)`, and the factor of the cubic term (Hendrycks and Gimpel 2016).
const FACTOR: f64 = 0.797_884_560_802_865_4;
const CUBE: f64 = 0.044_715;

/// Returns the tanh approximation: `0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))`.
pub(super) fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + (FACTOR * (x + CUBE * x * x * x)).tanh())
}

/// Returns the derivative of [`gelu`].
pub(super) fn gelu_derivative(x: f64) -> f64 {
    let tanh = (FACTOR * (x + CUBE * x * x * x)).tanh();
    let inside = FACTOR * (1.0 + 3.0 * CUBE * x * x);
    0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inside
}
