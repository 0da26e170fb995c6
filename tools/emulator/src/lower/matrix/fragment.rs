//! The positions of matrix elements in the registers of the lanes.
//!
//! A single rule gives the tables of the manual for every shape of `mma.sync`. Lane `4 g + t` holds:
//!
//! - `A`: each register holds adjacent elements of row `g` of 8 rows. The first element is at column `t` times the
//!   number of elements per register. Registers advance along the rows first, then along the columns.
//! - `B`: the same with rows and columns exchanged. Registers also advance along `k` first.
//! - `C` and `D`: two adjacent elements, at row `g` and column `2 t` of a block of 8 by 8. Pairs advance along the
//!   rows first.
//!
//! The fragments of `wmma` are opaque. The emulator uses the same rule, which for 16x16x16 and 16x16x8 corresponds to
//! two adjacent products of `mma.sync`. Fragments of f16 have eight registers for every shape, and repeat the
//! elements to fill them. The first copy is read.

use crate::machine::{LANES, Warp};

use super::element::{Accumulator, Element, per_register};

/// The role of a matrix in `D = A B + C`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MatrixRole {
    A,
    B,
    /// `C` and `D`.
    Sum,
}

/// The rows of `A`, the columns of `B`, and the length of the sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

impl Shape {
    /// Parses a shape such as `m16n8k16`.
    pub fn parse(text: &str) -> Option<Self> {
        let (m, rest) = text.strip_prefix('m')?.split_once('n')?;
        let (n, k) = rest.split_once('k')?;
        let number = |text: &str| text.parse().ok();
        let (m, n, k) = (number(m)?, number(n)?, number(k)?);
        Some(Self { m, n, k })
    }

    /// Returns the numbers of rows and columns of a matrix.
    pub fn size(self, role: MatrixRole) -> (usize, usize) {
        match role {
            MatrixRole::A => (self.m, self.k),
            MatrixRole::B => (self.k, self.n),
            MatrixRole::Sum => (self.m, self.n),
        }
    }

    /// Returns the number of registers that hold each element once.
    pub fn registers(self, role: MatrixRole, bits: u32) -> usize {
        let (rows, columns) = self.size(role);
        (rows * columns).div_ceil(LANES * per_register(bits))
    }

    /// Returns the row and the column of an element: the `part`th element of a lane's register.
    pub fn place(
        self,
        role: MatrixRole,
        bits: u32,
        register: usize,
        lane: usize,
        part: usize,
    ) -> (usize, usize) {
        let per = per_register(bits);
        let register = register % self.registers(role, bits);
        let (group, thread) = (lane / 4, lane % 4);
        // Blocks of eight along the first direction, and the position in the other direction.
        let spread = |length: usize| {
            let blocks = length / 8;
            (
                register % blocks * 8 + group,
                (register / blocks * 4 + thread) * per + part,
            )
        };
        match role {
            MatrixRole::A => spread(self.m),
            MatrixRole::B => {
                let steps = self.k / (4 * per);
                let (step, block) = (register % steps, register / steps);
                ((step * 4 + thread) * per + part, block * 8 + group)
            }
            MatrixRole::Sum => {
                let element = register * per + part;
                let (pair, side) = (element / 2, element % 2);
                let blocks = self.m / 8;
                (
                    pair % blocks * 8 + group,
                    pair / blocks * 8 + 2 * thread + side,
                )
            }
        }
    }
}

/// The registers of a matrix, and the positions of their elements in the matrix.
pub(super) struct Fragment {
    registers: Vec<usize>,
    /// The index of each element in row-major order, by register, lane and part.
    places: Vec<u16>,
}

impl Fragment {
    /// Creates the fragment of registers that hold a matrix once or several times.
    pub fn new(shape: Shape, role: MatrixRole, bits: u32, registers: &[usize]) -> Self {
        let columns = shape.size(role).1;
        let once = shape.registers(role, bits).min(registers.len());
        let places = each(once, bits).map(|(register, lane, part)| {
            let (row, column) = shape.place(role, bits, register, lane, part);
            (row * columns + column) as u16
        });
        Self {
            registers: registers[..once].to_vec(),
            places: places.collect(),
        }
    }

    /// Reads the matrix in row-major order.
    #[inline]
    pub fn gather<E: Element>(&self, warp: &Warp, matrix: &mut [f64]) {
        let per = const { per_register(E::BITS) };
        let tables = self.places.chunks_exact(LANES * per);
        for (register, table) in self.registers.iter().zip(tables) {
            let lanes = &warp.registers[*register];
            for (bits, places) in lanes.iter().zip(table.chunks_exact(per)) {
                for (part, place) in places.iter().enumerate() {
                    matrix[usize::from(*place)] = E::value(bits >> (part as u32 * E::BITS));
                }
            }
        }
    }

    /// Writes a matrix to the registers.
    #[inline]
    pub fn scatter<E: Accumulator>(&self, warp: &mut Warp, matrix: &[f64]) {
        let per = const { per_register(E::BITS) };
        let tables = self.places.chunks_exact(LANES * per);
        for (register, table) in self.registers.iter().zip(tables) {
            let lanes = &mut warp.registers[*register];
            for (bits, places) in lanes.iter_mut().zip(table.chunks_exact(per)) {
                *bits = 0;
                for (part, place) in places.iter().enumerate() {
                    *bits |= E::bits(matrix[usize::from(*place)]) << (part as u32 * E::BITS);
                }
            }
        }
    }
}

/// Returns every register, lane and part, in order.
pub(super) fn each(registers: usize, bits: u32) -> impl Iterator<Item = (usize, usize, usize)> {
    let per = per_register(bits);
    (0..registers * LANES * per).map(move |number| {
        let (word, part) = (number / per, number % per);
        (word / LANES, word % LANES, part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [(&str, u32, u32); 16] = [
        ("m16n8k16", 16, 32),
        ("m16n8k8", 16, 16),
        ("m16n8k4", 32, 32),
        ("m16n8k8", 32, 32),
        ("m16n8k32", 8, 32),
        ("m16n8k16", 8, 32),
        ("m8n8k16", 8, 32),
        ("m8n8k32", 4, 32),
        ("m16n8k64", 4, 32),
        ("m8n8k4", 64, 64),
        ("m16n8k16", 64, 64),
        ("m16n16k16", 16, 32),
        ("m32n8k16", 16, 16),
        ("m8n32k16", 16, 32),
        ("m16n16k8", 32, 32),
        ("m8n32k16", 8, 32),
    ];

    #[test]
    fn each_element_lies_in_one_place() {
        for (text, bits, sums) in SHAPES {
            let shape = Shape::parse(text).expect(text);
            for (role, bits) in [
                (MatrixRole::A, bits),
                (MatrixRole::B, bits),
                (MatrixRole::Sum, sums),
            ] {
                let (rows, columns) = shape.size(role);
                let mut seen = vec![0; rows * columns];
                for (register, lane, part) in each(shape.registers(role, bits), bits) {
                    let (row, column) = shape.place(role, bits, register, lane, part);
                    seen[row * columns + column] += 1;
                }
                assert!(
                    seen.iter().all(|count| *count == 1),
                    "{text} {role:?} {seen:?}"
                );
            }
        }
    }

    /// Rows of the manual's tables for lane 13, which has group 3 and thread 1.
    #[test]
    fn lane_13_holds_what_the_manual_says() {
        let at = |text, role, bits, register, part| {
            let shape = Shape::parse(text).expect(text);
            shape.place(role, bits, register, 13, part)
        };
        for (register, place) in [(3, 2), (11, 2), (3, 10), (11, 10)].into_iter().enumerate() {
            assert_eq!(at("m16n8k16", MatrixRole::A, 16, register, 0), place);
        }
        assert_eq!(at("m16n8k16", MatrixRole::A, 16, 2, 1), (3, 11));
        assert_eq!(at("m16n8k16", MatrixRole::B, 16, 0, 1), (3, 3));
        assert_eq!(at("m16n8k16", MatrixRole::B, 16, 1, 0), (10, 3));
        assert_eq!(at("m16n8k16", MatrixRole::Sum, 32, 1, 0), (3, 3));
        assert_eq!(at("m16n8k16", MatrixRole::Sum, 32, 2, 0), (11, 2));
        assert_eq!(at("m16n8k16", MatrixRole::Sum, 16, 1, 1), (11, 3));
        assert_eq!(at("m16n8k32", MatrixRole::A, 8, 2, 3), (3, 23));
        assert_eq!(at("m16n8k32", MatrixRole::A, 8, 1, 0), (11, 4));
        assert_eq!(at("m16n8k32", MatrixRole::B, 8, 1, 2), (22, 3));
        assert_eq!(at("m16n8k8", MatrixRole::A, 32, 3, 0), (11, 5));
        assert_eq!(at("m16n8k8", MatrixRole::B, 32, 1, 0), (5, 3));
        assert_eq!(at("m8n8k4", MatrixRole::A, 64, 0, 0), (3, 1));
        assert_eq!(at("m8n8k4", MatrixRole::B, 64, 0, 0), (1, 3));
        assert_eq!(at("m8n8k4", MatrixRole::Sum, 64, 1, 0), (3, 3));
        assert_eq!(at("m16n8k64", MatrixRole::A, 4, 2, 7), (3, 47));
        assert_eq!(at("m16n16k16", MatrixRole::Sum, 32, 5, 0), (3, 11));
        assert_eq!(at("m16n16k16", MatrixRole::Sum, 32, 6, 0), (11, 10));
    }
}
