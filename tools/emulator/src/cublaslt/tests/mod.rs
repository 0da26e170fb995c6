//! Compares products with plain loops, and tests every rule and the C functions.

use half::{bf16, f16};

use super::algorithm::Algorithm;
use super::attributes::{Attributes, description as of, layout, preference};
use super::call::{Call, Scalar};
use super::rules::{self, Product};
use super::{CHIP, Chip, Refusal};
use crate::element::Element::{self, BF16, E4M3, E5M2, F16, F32, F64};
use crate::memory::Memory;

mod gelu;
mod interface;
mod numbers;
mod refused;

const BLACKWELL: Chip = Chip {
    capability: (10, 0),
    version: 120_901,
};

/// A requested product.
#[derive(Clone)]
struct Asked {
    description: Attributes,
    /// The layouts of `A`, `B`, `C` and `D`.
    layouts: [Attributes; 4],
    chip: Chip,
}

fn number(element: Element) -> u64 {
    match element {
        F32 => 0,
        F64 => 1,
        F16 => 2,
        BF16 => 14,
        E4M3 => 28,
        E5M2 => 29,
    }
}

fn matrix(element: Element, rows: usize, columns: usize, leading: usize) -> Attributes {
    Attributes::new(layout::TABLE)
        .with(layout::TYPE, number(element))
        .with(layout::ROWS, rows as u64)
        .with(layout::COLS, columns as u64)
        .with(layout::LD, leading as u64)
}

impl Asked {
    /// Returns the request `op(A) op(B)` of size `[m, n, k]`, with `gap` elements between columns.
    fn new(
        [a, b, d]: [Element; 3],
        [m, n, k]: [usize; 3],
        [trans_a, trans_b]: [bool; 2],
        gap: usize,
    ) -> Self {
        let (compute, scalars) = if a == F64 { (70, F64) } else { (68, F32) };
        let turn = |rows, columns, turned: bool| {
            if turned {
                (columns, rows)
            } else {
                (rows, columns)
            }
        };
        let lies = |element, (rows, columns)| matrix(element, rows, columns, rows + gap);
        let result = lies(d, (m, n));
        Self {
            description: Attributes::new(of::TABLE)
                .with(of::COMPUTE_TYPE, compute)
                .with(of::SCALE_TYPE, number(scalars))
                .with(of::TRANSA, trans_a.into())
                .with(of::TRANSB, trans_b.into()),
            layouts: [
                lies(a, turn(m, k, trans_a)),
                lies(b, turn(k, n, trans_b)),
                result.clone(),
                result,
            ],
            chip: CHIP,
        }
    }

    /// Returns a valid request with 8-bit factors.
    fn narrow(d: Element) -> Self {
        Self::new([E4M3, E4M3, d], [32, 48, 64], [true, false], 0)
    }

    fn with(mut self, attribute: u32, value: u64) -> Self {
        // Panics on a wrong attribute number.
        assert!(self.description.bytes(attribute).is_ok());
        self.description = self.description.with(attribute, value);
        self
    }

    fn layout(mut self, which: usize, attribute: u32, value: u64) -> Self {
        self.layouts[which] = self.layouts[which].clone().with(attribute, value);
        self
    }

    fn on(self, chip: Chip) -> Self {
        Self { chip, ..self }
    }

    fn check(&self) -> Result<Product, Refusal> {
        let [a, b, c, d] = &self.layouts;
        rules::check(&self.description, [a, b, c, d], self.chip)
    }
}

/// Returns a call whose matrices are in memory. All bytes are 0xff.
fn call(product: Product, memory: &Memory) -> Call {
    let new = |bytes| memory.allocate(bytes, u64::MAX).expect("there is memory");
    let Product { a, b, d, .. } = product;
    let result = new(d.bytes());
    Call {
        product,
        alpha: Scalar::Value(1.0),
        beta: Scalar::Value(0.0),
        a: new(a.bytes()),
        b: new(b.bytes()),
        c: result,
        d: result,
        bias: 0,
        auxiliary: 0,
        scales: [0; 4],
        workspace: 0,
        workspace_bytes: 0,
    }
}

fn algorithm(product: &Product) -> Algorithm {
    Algorithm::implicit(product)
}

/// Returns the next pseudorandom number in [-1, 1).
fn draw(seed: &mut u64) -> f64 {
    *seed = seed
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 40) as f64 / (1u64 << 23) as f64 - 1.0
}

/// Stores a random number that the type can represent, and returns it. It does not use the code of the library.
fn put(element: Element, address: u64, seed: &mut u64) -> f64 {
    // SAFETY: the tests pass addresses of memory that they have allocated.
    unsafe {
        match element {
            F64 => {
                let value = draw(seed);
                (address as *mut f64).write(value);
                value
            }
            F32 => {
                let value = draw(seed) as f32;
                (address as *mut f32).write(value);
                value.into()
            }
            F16 => {
                let value = f16::from_f64(draw(seed));
                (address as *mut f16).write(value);
                value.into()
            }
            BF16 => {
                let value = bf16::from_f64(draw(seed));
                (address as *mut bf16).write(value);
                value.into()
            }
            E4M3 | E5M2 => {
                // Normal numbers around 1, composed of their fields.
                let (bits, bias) = if element == E4M3 { (3, 7) } else { (2, 15) };
                let parts = (draw(seed) * 1e6) as i32 as u32;
                let (exponent, mantissa) = (parts % 4, parts / 4 % (1 << bits));
                let sign = parts / 256 % 2;
                let code = sign << 7 | (exponent + bias - 2) << bits | mantissa;
                (address as *mut u8).write(code as u8);
                let size = (1.0 + f64::from(mantissa) / f64::from(1 << bits))
                    * 2f64.powi(exponent as i32 - 2);
                if sign == 1 { -size } else { size }
            }
        }
    }
}

/// Reads a number of the result without the code of the library.
fn read(element: Element, address: u64) -> f64 {
    // SAFETY: the same as in `put`.
    unsafe {
        match element {
            F64 => *(address as *const f64),
            F32 => (*(address as *const f32)).into(),
            F16 => (*(address as *const f16)).into(),
            BF16 => (*(address as *const bf16)).into(),
            E4M3 | E5M2 => unreachable!("results of 8 bits are read by their codes"),
        }
    }
}
