//! Checks the rules in the documentation of `cublasLtMatmul`.

use super::attributes::{Attributes, description as of, layout};
use super::epilogue::{Auxiliary, Epilogue};
use super::scales::ScaleMode::{self, Blocks, OuterVec, Scalar, Vec32, Vec128};
use super::{Chip, Refusal, invalid, unsupported};
use crate::element::Element::{self, BF16, E4M3, E5M2, F16, F32, F64};

/// A column-major matrix in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Matrix {
    pub element: Element,
    pub rows: usize,
    pub columns: usize,
    /// The number of elements from one column to the next.
    pub leading: usize,
    pub transposed: bool,
}

/// A product that is allowed: `D = scale epilogue(alpha op(A) op(B) + beta C + bias)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub a: Matrix,
    pub b: Matrix,
    pub c: Matrix,
    pub d: Matrix,
    /// The type of the bias that is added, or of the gradient that is computed.
    pub bias: Option<Element>,
    /// The matrix that GELU writes or reads.
    pub auxiliary: Option<Auxiliary>,
    /// The scale modes of 8-bit factors.
    pub scales: Option<[ScaleMode; 2]>,
    /// The type of `alpha` and `beta`.
    pub scalars: Element,
    /// Whether `alpha` and `beta` are in device memory.
    pub on_device: bool,
}

impl Matrix {
    fn of(name: char, attributes: &Attributes, operation: i32) -> Result<Self, Refusal> {
        let number = attributes.int(layout::TYPE);
        let Some(element) = Element::of(number) else {
            return Err(unsupported(format!(
                "{name} has the type {number}: f64, f32, f16, bf16, e4m3 and e5m2 are emulated"
            )));
        };
        for (attribute, value, what) in [
            (layout::ORDER, 0, "an order other than column-major"),
            (layout::BATCH_COUNT, 1, "a batch"),
            (layout::BATCH_MODE, 0, "a batch of pointers"),
            (layout::PLANE_OFFSET, 0, "planes"),
        ] {
            if attributes.get(attribute) != value {
                return Err(unsupported(format!("{name} has {what}: not emulated")));
            }
        }
        let size = |attribute| usize::try_from(attributes.get(attribute) as i64).ok();
        let [rows, columns, leading] = [layout::ROWS, layout::COLS, layout::LD].map(size);
        let (Some(rows @ 1..), Some(columns @ 1..), Some(leading)) = (rows, columns, leading)
        else {
            return Err(invalid(format!(
                "{name} has no elements, or a negative size"
            )));
        };
        // All columns of `C` may be the same column.
        if leading < rows && !(name == 'C' && leading == 0) {
            return Err(invalid(format!(
                "{name} has {rows} rows and the leading dimension {leading}: its columns overlap"
            )));
        }
        let bytes = leading
            .checked_mul(columns)
            .and_then(|all| all.checked_mul(8));
        if bytes.is_none() {
            return Err(invalid(format!("{name} is larger than any memory")));
        }
        Ok(Self {
            element,
            rows,
            columns,
            leading,
            transposed: operation != 0,
        })
    }

    /// Returns the numbers of rows and columns after the operation.
    fn sizes(&self) -> [usize; 2] {
        if self.transposed {
            [self.columns, self.rows]
        } else {
            [self.rows, self.columns]
        }
    }

    /// Returns the number of bytes from the first to the last byte.
    pub(super) fn bytes(&self) -> usize {
        ((self.columns - 1) * self.leading + self.rows) * self.element.bytes()
    }
}

/// Checks all rules that do not depend on addresses. `layouts` are the layouts of `A`, `B`, `C` and `D`.
///
/// # Errors
/// Returns the first rule that is broken.
pub(super) fn check(
    description: &Attributes,
    layouts: [&Attributes; 4],
    chip: Chip,
) -> Result<Product, Refusal> {
    let [a, b, c, d] = layouts;
    let [trans_a, trans_b] = [of::TRANSA, of::TRANSB].map(|which| description.int(which));
    let a = Matrix::of('A', a, operation("TRANSA", trans_a)?)?;
    let b = Matrix::of('B', b, operation("TRANSB", trans_b)?)?;
    let (c, d) = (Matrix::of('C', c, 0)?, Matrix::of('D', d, 0)?);
    let ([m, k], [depth, n]) = (a.sizes(), b.sizes());
    if depth != k || [d.rows, d.columns] != [m, n] || [c.rows, c.columns] != [m, n] {
        return Err(invalid(format!(
            "op(A) is {m} x {k}, op(B) {depth} x {n}, C {} x {} and D {} x {}: they do not belong \
             together",
            c.rows, c.columns, d.rows, d.columns
        )));
    }
    let mut product = Product {
        m,
        n,
        k,
        a,
        b,
        c,
        d,
        bias: None,
        auxiliary: None,
        scales: None,
        scalars: computed_in(description)?,
        on_device: pointers(description)?,
    };
    extras(description)?;
    let epilogue = Epilogue::of(description)?;
    product.bias = bias(epilogue, description, &product)?;
    product.auxiliary = epilogue.auxiliary(description, &d)?;
    if a.element.is_narrow() || b.element.is_narrow() {
        product.scales = Some(narrow(description, &product, chip)?)
    } else {
        wide(description, &product)?
    }
    Ok(product)
}

fn operation(name: &str, number: i32) -> Result<i32, Refusal> {
    match number {
        // The conjugate of a real number is the number itself.
        0..=2 => Ok(number),
        _ => Err(invalid(format!(
            "{name} is {number}, which is not an operation"
        ))),
    }
}

/// Returns the compute type. It must match the type of the scalars.
fn computed_in(description: &Attributes) -> Result<Element, Refusal> {
    let (compute, scalars) = (
        description.int(of::COMPUTE_TYPE),
        description.int(of::SCALE_TYPE),
    );
    let fits = match compute {
        // CUBLAS_COMPUTE_32F and 64F, each also as _PEDANTIC.
        68 | 69 => F32,
        70 | 71 => F64,
        _ => {
            return Err(unsupported(format!(
                "the compute type is {compute}: 32F and 64F are emulated"
            )));
        }
    };
    if Element::of(scalars) == Some(fits) {
        Ok(fits)
    } else {
        Err(unsupported(format!(
            "the scale type is {scalars}: sums in {fits:?} go with scalars in {fits:?}"
        )))
    }
}

fn pointers(description: &Attributes) -> Result<bool, Refusal> {
    match description.int(of::POINTER_MODE) {
        0 => Ok(false),
        1 => Ok(true),
        mode => Err(unsupported(format!(
            "the pointer mode is {mode}: those of scalars on the host and on the device are emulated"
        ))),
    }
}

/// Refuses attributes that are not emulated.
fn extras(description: &Attributes) -> Result<(), Refusal> {
    for (attribute, value, name) in [
        (of::TRANSC, 0, "TRANSC"),
        (of::FILL_MODE, of::FULL as u64, "FILL_MODE"),
        (of::AMAX_D_POINTER, 0, "AMAX_D_POINTER"),
        (
            of::EPILOGUE_AUX_SCALE_POINTER,
            0,
            "EPILOGUE_AUX_SCALE_POINTER",
        ),
        (
            of::EPILOGUE_AUX_AMAX_POINTER,
            0,
            "EPILOGUE_AUX_AMAX_POINTER",
        ),
        (of::C_SCALE_MODE, 0, "C_SCALE_MODE"),
        (of::D_SCALE_MODE, 0, "D_SCALE_MODE"),
        (of::D_OUT_SCALE_POINTER, 0, "D_OUT_SCALE_POINTER"),
    ] {
        if description.get(attribute) != value {
            return Err(unsupported(format!("{name} is set: not emulated")));
        }
    }
    Ok(())
}

/// Returns the type of the bias. The tables decide whether the type is allowed.
fn bias(
    epilogue: Epilogue,
    description: &Attributes,
    product: &Product,
) -> Result<Option<Element>, Refusal> {
    if !epilogue.bias {
        return Ok(None);
    }
    let Product { c, d, .. } = product;
    // The default is the type of `D`, or the type of `C` if `D` is an 8-bit matrix.
    let usual = if d.element.is_narrow() { c } else { d };
    match description.int(of::BIAS_DATA_TYPE) {
        -1 => Ok(Some(usual.element)),
        number => Element::of(number)
            .map(Some)
            .ok_or_else(|| unsupported(format!("the type of the bias is {number}"))),
    }
}

fn same_type_of_c_and_d(product: &Product) -> Result<(), Refusal> {
    let (c, d) = (product.c.element, product.d.element);
    if c == d {
        Ok(())
    } else {
        Err(unsupported(format!(
            "C is {c:?} and D {d:?}: one type fits"
        )))
    }
}

fn wide(description: &Attributes, product: &Product) -> Result<(), Refusal> {
    let Product { a, b, c, bias, .. } = product;
    same_type_of_c_and_d(product)?;
    let fits = matches!(
        (product.scalars, a.element, c.element),
        (F32, BF16, BF16 | F32) | (F32, F16, F16 | F32) | (F32, F32, F32) | (F64, F64, F64)
    );
    if a.element != b.element || !fits {
        return Err(unsupported(format!(
            "A is {:?}, B {:?} and C {:?} with sums in {:?}: not in the table of types",
            a.element, b.element, c.element, product.scalars
        )));
    }
    if let Some(bias) = bias.filter(|bias| *bias != c.element) {
        return Err(unsupported(format!(
            "the bias is {bias:?} and C {:?}: one type fits",
            c.element
        )));
    }
    for (attribute, name) in [
        (of::A_SCALE_POINTER, "A"),
        (of::B_SCALE_POINTER, "B"),
        (of::C_SCALE_POINTER, "C"),
        (of::D_SCALE_POINTER, "D"),
        (of::A_SCALE_MODE, "A"),
        (of::B_SCALE_MODE, "B"),
    ] {
        if description.get(attribute) != 0 {
            return Err(unsupported(format!(
                "a scale of {name} is set: only products of 8-bit factors have scales"
            )));
        }
    }
    Ok(())
}

/// Checks the rules of 8-bit factors.
fn narrow(
    description: &Attributes,
    product: &Product,
    chip: Chip,
) -> Result<[ScaleMode; 2], Refusal> {
    let Product { m, n, k, a, b, .. } = product;
    let Chip { capability, .. } = chip;
    if product.auxiliary.is_some() {
        return Err(unsupported("GELU after 8-bit factors: not emulated"));
    }
    if product.scalars != F32 {
        return Err(unsupported("products of 8-bit factors have sums in 32F"));
    }
    narrow_types(product)?;
    if [a.transposed, b.transposed] != [true, false] && capability < (10, 0) {
        return Err(unsupported(
            "8-bit factors are \"TN\" on this GPU: A transposed and B not",
        ));
    }
    if [m, n, k].into_iter().any(|size| !size.is_multiple_of(16)) {
        return Err(unsupported(format!(
            "m, n and k are {m}, {n} and {k}: multiples of 16 fit 8-bit factors"
        )));
    }
    for (name, matrix) in [('A', a), ('B', b), ('C', &product.c), ('D', &product.d)] {
        let bytes = matrix.leading * matrix.element.bytes();
        if !bytes.is_multiple_of(16) {
            return Err(unsupported(format!(
                "columns of {name} are {bytes} bytes apart: multiples of 16 fit 8-bit factors"
            )));
        }
    }
    if description.get(of::D_SCALE_POINTER) != 0 && !product.d.element.is_narrow() {
        return Err(unsupported("D has a scale and is not of 8 bits"));
    }
    let mode = |number: i32| {
        ScaleMode::of(number)
            .ok_or_else(|| unsupported(format!("the scale mode {number} is not for 8-bit factors")))
    };
    let modes = [
        mode(description.int(of::A_SCALE_MODE))?,
        mode(description.int(of::B_SCALE_MODE))?,
    ];
    scaled(modes, product, chip)?;
    Ok(modes)
}

fn narrow_types(product: &Product) -> Result<(), Refusal> {
    let Product { a, b, c, d, .. } = product;
    let (a, b, c, d) = (a.element, b.element, c.element, d.element);
    let mixed = match [a, b] {
        [E4M3, E4M3] => false,
        [E4M3, E5M2] | [E5M2, E4M3] => true,
        _ => {
            return Err(unsupported(format!(
                "A is {a:?} and B {b:?}: both are of 8 bits, and one at the least is E4M3"
            )));
        }
    };
    let fits = match d {
        F32 | F16 | BF16 => c == d,
        E4M3 => matches!(c, BF16 | F16),
        E5M2 => mixed && matches!(c, BF16 | F16),
        F64 => false,
    };
    if !fits {
        return Err(unsupported(format!(
            "C is {c:?} and D {d:?} with factors {a:?} and {b:?}: not in the table of types"
        )));
    }
    let biased = if c == F16 { F16 } else { BF16 };
    match product.bias {
        Some(bias) if bias != biased => Err(unsupported(format!(
            "the bias is {bias:?}: with C in {c:?} it is {biased:?}"
        ))),
        _ => Ok(()),
    }
}

/// Checks the table "Scaling Mode Support Overview", and the combinations of scale modes.
fn scaled(modes: [ScaleMode; 2], product: &Product, chip: Chip) -> Result<(), Refusal> {
    let together = matches!(
        modes,
        [Scalar, Scalar]
            | [OuterVec, OuterVec]
            | [Vec32, Vec32]
            | [Vec128, Vec128 | Blocks]
            | [Blocks, Vec128]
    );
    if !together {
        let [a, b] = modes;
        return Err(unsupported(format!(
            "the scale modes {a:?} of A and {b:?} of B do not go together"
        )));
    }
    let Chip {
        capability,
        version,
    } = chip;
    let (here, least, where_) = match modes[0] {
        Scalar => (capability >= (8, 9), 120_000, "8.9 and later"),
        OuterVec | Vec128 | Blocks => (capability == (9, 0), 120_900, "9.0"),
        Vec32 => (capability >= (10, 0), 120_800, "10.0 and later"),
    };
    if !here {
        return Err(unsupported(format!(
            "scales {:?} are for compute capability {where_}, and this is {capability:?}",
            modes[0]
        )));
    }
    if version < least {
        return Err(unsupported(format!(
            "scales {:?} came with version {least}",
            modes[0]
        )));
    }
    if modes[0] != Scalar && product.d.element.is_narrow() {
        Err(unsupported(format!(
            "D is of 8 bits with scales {:?}: not with this mode, or not emulated",
            modes[0]
        )))
    } else {
        Ok(())
    }
}
