//! A call of `cublasLtMatmul`: its addresses, and its execution on the stream.

use serde_json::{Value, json};

use super::algorithm::Algorithm;
use super::epilogue::{self, Auxiliary, Gelu, gelu, gelu_derivative};
use super::product::{Factor, multiply};
use super::rules::{Matrix, Product};
use super::scales::ScaleMode;
use super::{Refusal, invalid, unsupported};
use crate::element::Element;
use crate::memory::{Memory, Snapshot};

/// The value of results that are not computed. It is small enough to keep a training step finite. Every type can
/// represent it except E4M3, which rounds it to 0.
const FILL: f64 = 1.0 / 1024.0;

/// `alpha` or `beta`.
#[derive(Clone, Copy, Debug)]
pub(super) enum Scalar {
    Value(f64),
    /// A device address that is read when the product is computed.
    At(u64),
}

/// A product with its addresses. Addresses of missing operands are 0.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call {
    pub product: Product,
    pub alpha: Scalar,
    pub beta: Scalar,
    pub a: u64,
    pub b: u64,
    pub c: u64,
    pub d: u64,
    pub bias: u64,
    pub auxiliary: u64,
    /// The addresses of the scales of `A`, `B`, `C` and `D`.
    pub scales: [u64; 4],
    pub workspace: u64,
    pub workspace_bytes: usize,
}

impl Call {
    /// Checks the rules that depend only on the addresses.
    ///
    /// # Errors
    /// Returns the first rule that is broken.
    pub(super) fn check(&self, algorithm: &Algorithm) -> Result<(), Refusal> {
        let Product { a, b, c, d, .. } = &self.product;
        let matrices = [
            ('A', self.a, a, algorithm.alignments[0]),
            ('B', self.b, b, algorithm.alignments[1]),
            ('C', self.c, c, algorithm.alignments[2]),
            ('D', self.d, d, algorithm.alignments[3]),
        ];
        for (name, address, matrix, alignment) in matrices {
            if address != 0 {
                self.aligned(name, address, matrix, alignment.into())?;
            } else if name != 'C' || self.reads_c() {
                return Err(invalid(format!("{name} is null")));
            }
        }
        self.apart()?;
        self.auxiliary_apart()?;
        self.added_and_scaled()?;
        self.works_in(algorithm)
    }

    fn reads_c(&self) -> bool {
        !matches!(self.beta, Scalar::Value(0.0))
    }

    fn aligned(
        &self,
        name: char,
        address: u64,
        matrix: &Matrix,
        advised: u64,
    ) -> Result<(), Refusal> {
        let own = matrix.element.bytes() as u64;
        let least = match self.product.scales {
            Some(_) => 16,
            None => own,
        };
        if !address.is_multiple_of(least) {
            return Err(unsupported(format!(
                "{name} is at {address:#x}: a multiple of {least} bytes is needed"
            )));
        }
        if address.is_multiple_of(advised) {
            Ok(())
        } else {
            Err(invalid(format!(
                "{name} is at {address:#x}, and the heuristic was told that it is a multiple of \
                 {advised}"
            )))
        }
    }

    /// Checks that `D` is equal to `C`, or overlaps no other operand.
    fn apart(&self) -> Result<(), Refusal> {
        let Product { a, b, c, d, .. } = &self.product;
        if self.c == self.d && c != d {
            return Err(invalid("C lies where D does, with another layout"));
        }
        let ends = |address: u64, matrix: &Matrix| address + matrix.bytes() as u64;
        for (name, address, matrix) in [('A', self.a, a), ('B', self.b, b), ('C', self.c, c)] {
            let overlap = address < ends(self.d, d) && self.d < ends(address, matrix);
            let read = name != 'C' || (address != self.d && self.reads_c());
            if overlap && read {
                return Err(invalid(format!("{name} and D overlap")));
            }
        }
        Ok(())
    }

    /// Checks that the auxiliary matrix overlaps neither `D` nor, where the product writes it, `A` and `B`.
    fn auxiliary_apart(&self) -> Result<(), Refusal> {
        let Product {
            a,
            b,
            d,
            auxiliary: Some(Auxiliary { gelu, matrix }),
            ..
        } = &self.product
        else {
            return Ok(());
        };
        let (start, end) = (self.auxiliary, self.auxiliary + matrix.bytes() as u64);
        for (name, address, other) in [('A', self.a, a), ('B', self.b, b), ('D', self.d, d)] {
            let overlap = address < end && start < address + other.bytes() as u64;
            if overlap && (name == 'D' || *gelu == Gelu::Forward) {
                return Err(invalid(format!("{name} and the auxiliary matrix overlap")));
            }
        }
        Ok(())
    }

    fn added_and_scaled(&self) -> Result<(), Refusal> {
        let Product { bias, scales, .. } = self.product;
        let place = |name: &str, address: u64, alignment: u64| match address {
            0 => Err(invalid(format!("{name} has no address"))),
            _ if address.is_multiple_of(alignment) => Ok(()),
            _ => Err(invalid(format!(
                "{name} is at {address:#x}: a multiple of {alignment} bytes is needed"
            ))),
        };
        if let Some(element) = bias {
            place("the bias", self.bias, element.bytes() as u64)?;
        }
        if self.product.auxiliary.is_some() {
            place("the auxiliary matrix", self.auxiliary, epilogue::ALIGNMENT)?;
        }
        for (mode, address) in scales.iter().flatten().zip(self.scales) {
            // One scale may be omitted. It is then 1.
            if address != 0 || *mode != ScaleMode::Scalar {
                place("a scale", address, mode.alignment())?;
            }
        }
        for address in self.scales[2..].iter().filter(|address| **address != 0) {
            place("a scale", *address, 4)?;
        }
        Ok(())
    }

    fn works_in(&self, algorithm: &Algorithm) -> Result<(), Refusal> {
        if self.workspace_bytes < algorithm.workspace {
            return Err(invalid(format!(
                "the workspace has {} bytes: the algorithm needs {}",
                self.workspace_bytes, algorithm.workspace
            )));
        }
        let used = self.workspace_bytes > 0;
        if used && (self.workspace == 0 || !self.workspace.is_multiple_of(256)) {
            Err(invalid(format!(
                "the workspace is at {:#x}: a multiple of 256 bytes is needed",
                self.workspace
            )))
        } else {
            Ok(())
        }
    }

    /// Computes the product.
    ///
    /// # Errors
    /// Returns the first address outside of the device memory.
    pub(super) fn run(&self, memory: &Memory) -> Result<(), String> {
        self.within(memory)?;
        if self.workspace_bytes > 0 {
            let workspace = self.workspace as *mut u8;
            // SAFETY: the workspace is in device memory, as are all addresses below.
            unsafe { workspace.write_bytes(0xff, self.workspace_bytes) };
        }
        self.compute();
        Ok(())
    }

    /// Fills the result with [`FILL`], independent of the factors.
    ///
    /// # Errors
    /// The same as for [`run`](Self::run).
    pub(super) fn fill(&self, memory: &Memory) -> Result<(), String> {
        self.within(memory)?;
        let Product {
            m,
            d,
            bias,
            auxiliary,
            ..
        } = self.product;
        fill(self.d, &d);
        match (auxiliary, bias) {
            (
                Some(Auxiliary {
                    gelu: Gelu::Forward,
                    matrix,
                }),
                _,
            ) => {
                fill(self.auxiliary, &matrix);
            }
            (Some(_), Some(_)) => fill(
                self.bias,
                &Matrix {
                    rows: m,
                    columns: 1,
                    ..d
                },
            ),
            _ => {}
        }
        Ok(())
    }

    /// Returns the line for the file of counts.
    pub(super) fn line(&self) -> Value {
        let Product {
            m,
            n,
            k,
            bias,
            auxiliary,
            ..
        } = self.product;
        let Product { a, b, c, d, .. } = &self.product;
        let name = |element: Element| format!("{element:?}").to_lowercase();
        let scalar = |scalar| match scalar {
            Scalar::Value(value) => json!(value),
            Scalar::At(_) => json!("on device"),
        };
        let types = [a, b, c, d].map(|matrix| name(matrix.element));
        json!({
            "product": [m, n, k],
            "types": types,
            "transposed": [a.transposed, b.transposed],
            "alpha": scalar(self.alpha),
            "beta": scalar(self.beta),
            "bias": bias.map(name),
            "gelu": auxiliary.map(|of| format!("{:?}", of.gelu).to_lowercase()),
            "scales": self.product.scales.map(|modes| modes.map(|mode| format!("{mode:?}"))),
        })
    }

    fn within(&self, memory: &Memory) -> Result<(), String> {
        let memory = memory.snapshot();
        self.touched()
            .into_iter()
            .try_for_each(|(name, address, bytes)| within(&memory, name, address, bytes))
    }

    /// Returns all memory that the call reads or writes.
    fn touched(&self) -> Vec<(&'static str, u64, usize)> {
        let Product {
            m,
            n,
            k,
            a,
            b,
            c,
            d,
            bias,
            scales,
            scalars,
            ..
        } = &self.product;
        let mut touched = vec![
            ("A", self.a, a.bytes()),
            ("B", self.b, b.bytes()),
            ("D", self.d, d.bytes()),
        ];
        if self.reads_c() {
            touched.push(("C", self.c, c.bytes()));
        }
        if let Some(element) = bias {
            touched.push(("the bias", self.bias, m * element.bytes()));
        }
        if let Some(Auxiliary { matrix, .. }) = &self.product.auxiliary {
            touched.push(("the auxiliary matrix", self.auxiliary, matrix.bytes()));
        }
        if let Some([of_a, of_b]) = scales {
            touched.push(("the scales of A", self.scales[0], of_a.bytes(*m, *k)));
            touched.push(("the scales of B", self.scales[1], of_b.bytes(*n, *k)));
        }
        touched.push(("the scale of C", self.scales[2], 4));
        touched.push(("the scale of D", self.scales[3], 4));
        for (name, scalar) in [("alpha", self.alpha), ("beta", self.beta)] {
            if let Scalar::At(address) = scalar {
                touched.push((name, address, scalars.bytes()));
            }
        }
        touched.push(("the workspace", self.workspace, self.workspace_bytes));
        touched.retain(|(_, address, bytes)| *address != 0 && *bytes > 0);
        touched
    }

    fn compute(&self) {
        let Product { m, n, k, a, b, .. } = &self.product;
        let left = Factor {
            matrix: a,
            address: self.a,
            outer: *m,
            k: *k,
            along: a.transposed,
        };
        let right = Factor {
            matrix: b,
            address: self.b,
            outer: *n,
            k: *k,
            along: !b.transposed,
        };
        let scale = |which: usize, outer: usize, at: usize| match self.product.scales {
            Some(modes) if self.scales[which] != 0 => {
                let sizes = [[*m, *n][which], *k];
                // SAFETY: all of the scales are in device memory.
                unsafe { modes[which].load(self.scales[which], outer, at, sizes) }
            }
            _ => 1.0,
        };
        let mut last = self.last_step();
        let of_bias = self.bias_gradient();
        let mut sums = vec![0.0; if of_bias.is_some() { *m } else { 0 }];
        // SAFETY: the matrices are in device memory.
        unsafe {
            multiply(
                [&left, &right],
                |row, at| scale(0, row, at),
                |column, at| scale(1, column, at),
                |row, column, sum| {
                    let value = last(row, column, sum);
                    if let Some(sum) = sums.get_mut(row) {
                        *sum += value;
                    }
                },
            );
        }
        if let Some(element) = of_bias {
            for (row, sum) in sums.iter().enumerate() {
                // SAFETY: the vector is in device memory.
                unsafe { element.store(self.bias + (row * element.bytes()) as u64, *sum) };
            }
        }
    }

    /// Returns the type of the gradient of a bias, or `None` if the gradient is not computed.
    fn bias_gradient(&self) -> Option<Element> {
        let Product {
            bias, auxiliary, ..
        } = self.product;
        let is_gradient = |of: &Auxiliary| of.gelu == Gelu::Gradient;
        bias.filter(|_| auxiliary.as_ref().is_some_and(is_gradient))
    }

    /// Returns the last step for the sum of a row and a column. The step stores the result, and returns the value
    /// before the final rounding.
    fn last_step(&self) -> impl FnMut(usize, usize, f64) -> f64 {
        let call = *self;
        let Product {
            c,
            d,
            auxiliary,
            scalars,
            ..
        } = call.product;
        let added = call.product.bias.filter(|_| call.bias_gradient().is_none());
        let scalar = |scalar| match scalar {
            Scalar::Value(value) => value,
            // SAFETY: the address is in device memory, as are all addresses below.
            Scalar::At(address) => unsafe { scalars.load(address) },
        };
        let one = |address| match address {
            0 => 1.0,
            _ => unsafe { Element::F32.load(address) },
        };
        let (alpha, beta) = (scalar(call.alpha), scalar(call.beta));
        let (of_c, of_d) = (one(call.scales[2]), one(call.scales[3]));
        move |row, column, sum| {
            // A GPU holds the sum in this type before this step.
            let sum = match scalars {
                Element::F64 => sum,
                _ => f64::from(sum as f32),
            };
            let mut value = alpha * sum;
            // SAFETY: the row and the column are inside the matrices.
            unsafe {
                // A value that is multiplied by 0 is not read.
                if beta != 0.0 {
                    value += beta * of_c * c.element.load(at(call.c, &c, row, column));
                }
                if let Some(element) = added {
                    value += element.load(call.bias + (row * element.bytes()) as u64);
                }
                if let Some(Auxiliary { gelu: way, matrix }) = auxiliary {
                    let place = at(call.auxiliary, &matrix, row, column);
                    match way {
                        Gelu::Forward => {
                            matrix.element.store(place, value);
                            value = gelu(value);
                        }
                        Gelu::Gradient => value *= gelu_derivative(matrix.element.load(place)),
                    }
                }
                d.element.store(at(call.d, &d, row, column), of_d * value);
            }
            value
        }
    }
}

/// Fills a matrix, but not the gaps between its columns.
fn fill(start: u64, matrix: &Matrix) {
    let size = matrix.element.bytes();
    let mut column = vec![0u8; matrix.rows * size];
    for place in column.chunks_exact_mut(size) {
        // SAFETY: `place` has the size of one element.
        unsafe { matrix.element.store(place.as_mut_ptr() as u64, FILL) };
    }
    for number in 0..matrix.columns {
        let to = at(start, matrix, 0, number) as *mut u8;
        // SAFETY: the column is in device memory.
        unsafe { to.copy_from_nonoverlapping(column.as_ptr(), column.len()) };
    }
}

fn at(start: u64, matrix: &Matrix, row: usize, column: usize) -> u64 {
    start + ((column * matrix.leading + row) * matrix.element.bytes()) as u64
}

fn within(memory: &Snapshot, name: &str, address: u64, bytes: usize) -> Result<(), String> {
    if memory.holds(address, bytes) {
        Ok(())
    } else {
        Err(format!(
            "{name} has {bytes} bytes at {address:#x}, {}",
            memory.nearest(address)
        ))
    }
}
