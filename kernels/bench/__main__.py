import sys

from headrace.kernels.bench.run import main

sys.exit(main())
