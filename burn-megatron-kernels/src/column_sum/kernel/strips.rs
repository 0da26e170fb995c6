//! The split of the rows into strips. Each strip produces one partial sum per column.

/// The number of units per cube.
pub(crate) const STRIP_UNITS: u32 = 256;
/// The minimum number of rows per strip. It keeps the number of partial sums small compared to the number of rows.
const MIN_ROWS: usize = 32;
/// The number of units that fills a large device. It limits the number of strips.
const MAX_UNITS: usize = 1 << 19;
/// The minimum number of adjacent units for which the units read complete sectors of memory.
const MIN_ACROSS: usize = 32;

/// The arrangement of a cube's units in two dimensions. A unit processes one group of columns and every n-th row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Strips {
    /// The number of strips. Strip `i` has the rows `i`, `i + count` and so on.
    pub count: usize,
    /// The number of units of a cube along the columns, a power of two.
    pub across: usize,
    /// The number of cubes along the columns.
    pub cubes_of_row: usize,
}

impl Strips {
    /// Splits `rows` rows with `groups` groups of columns.
    pub(crate) fn new(rows: usize, groups: usize) -> Self {
        let most = STRIP_UNITS as usize;
        // If the number of units is a power of two that divides the number of groups, no unit is without columns.
        let exact = 1 << groups.trailing_zeros().min(most.ilog2());
        let across = if exact >= MIN_ACROSS {
            exact
        } else {
            groups.next_power_of_two().min(most)
        };
        Self {
            count: rows.div_ceil(MIN_ROWS).min(MAX_UNITS.div_ceil(groups)),
            across,
            cubes_of_row: groups.div_ceil(across),
        }
    }

    /// Returns the number of cubes of the launch.
    pub(crate) fn cubes(&self) -> usize {
        let down = STRIP_UNITS as usize / self.across;
        self.cubes_of_row * self.count.div_ceil(down)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_matrix_fills_the_device() {
        // [65536, 2304] in bf16: a row takes 25 instructions, so a strip has at most 10^4 / 25 rows.
        let strips = Strips::new(65_536, 2304 / 8);
        assert!(strips.cubes() >= 132, "{strips:?}");
        assert!(65_536 / strips.count < 400, "{strips:?}");
        assert_eq!((strips.across, strips.cubes_of_row), (32, 9));
    }

    #[test]
    fn every_group_of_columns_and_strip_has_a_unit() {
        for groups in [1, 3, 31, 32, 96, 200, 256, 288, 1000, 1 << 20] {
            for rows in [0, 1, 31, 33, 4096, 65_536] {
                let strips = Strips::new(rows, groups);
                assert!(strips.across <= STRIP_UNITS as usize && strips.across.is_power_of_two());
                assert!(strips.across * strips.cubes_of_row >= groups);
                assert!(strips.count <= rows && (strips.count > 0) == (rows > 0));
                let units = strips.cubes() * STRIP_UNITS as usize;
                assert!(units >= strips.count * groups, "{strips:?}");
            }
        }
    }
}
